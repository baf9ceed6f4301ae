"""Which runs the real allocator is held against."""

import random
from dataclasses import dataclass, replace
from functools import cache

from prediction_cases import STRATEGIES

MODELS = {
    "nano": ("--model=nano", "--micro-batch=8"),
    "seed": ("--model=seed-134m", "--micro-batch=8"),
    "seed-125": ("--model=seed-134m", "--micro-batch=125"),
    "gpt2": ("--model=gpt2", "--micro-batch=4"),
    "gpt2-medium": ("--model=gpt2-medium", "--micro-batch=2"),
    "llama": ("--model=llama-3.2-1b", "--layers=4", "--seq-len=512", "--micro-batch=2"),
    "qwen3": ("--model=qwen3-0.6b", "--layers=6", "--seq-len=512", "--micro-batch=2"),
    "gqa": ("--model=qwen2.5-0.5b", "--layers=8", "--seq-len=512", "--micro-batch=2"),
}
BF16 = ("--precision=bf16",)
PURE = ("--precision=bf16-pure", "--betas", "0.9", "0.99")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; its name says it all."""

    name: str
    family: str
    flags: tuple[str, ...]
    ranks: int = 1
    limit_share: float | None = None
    """Of what the planner says that it needs."""
    expandable: bool = True
    """Whether the allocator has expandable segments."""


# Precision, checkpointing, micro-batches per step, model: each strategy has them in turn.
ROWS = (
    (BF16, "none", 1, "seed"),
    (BF16, "selective", 2, "gpt2"),
    (("--precision=fp32",), "full", 2, "nano"),
    (BF16, "full", 1, "gpt2-medium"),
    (("--precision=fp32",), "none", 1, "llama"),
    (BF16, "offload", 2, "qwen3"),
    (BF16, "none", 2, "gqa"),
)
OFFLOAD_ROWS = (
    (BF16, "none", 2, "nano"),
    (("--precision=fp32",), "selective", 1, "nano"),
    (BF16, "full", 1, "nano"),
)
# Techniques, by the strategies that have them.
TECHNIQUES = {
    "bf16-pure": (("single", "ddp", "fsdp", "zero1", "zero2", "zero3"), PURE),
    "fp16": (("single", "ddp", "zero2"), ("--precision=fp16",)),
    "bf16-moments": (
        ("single", "fsdp", "zero2"),
        (*BF16, "--moments-dtype=bf16", "--betas", "0.9", "0.99"),
    ),
    "adamw8bit": (("single", "ddp", "fsdp", "zero1", "zero3"), (*BF16, "--optimizer=adamw8bit")),
    "pure-8bit-full": (
        ("single", "fsdp"),
        (*PURE, "--optimizer=adamw8bit", "--activation-checkpointing=full"),
    ),
    "adafactor": (("single", "ddp", "fsdp"), (*BF16, "--optimizer=adafactor")),
    "muon": (("single", "fsdp"), (*BF16, "--optimizer=muon")),
    "sgd": (("single", "fsdp", "zero2"), (*BF16, "--optimizer=sgd")),
    "in-backward": (
        ("single", "fsdp", "fsdp-grad-op"),
        (*BF16, "--optimizer-in-backward", "--clip=0"),
    ),
    "offload-half": (
        ("zero3",),
        (*BF16, "--offload-optimizer=cpu", "--offload-fraction=0.5"),
    ),
    "eager": (("single", "fsdp"), (*BF16, "--attention=eager")),
    "math": (("single",), (*BF16, "--attention=sdpa-math")),
    "efficient": (("single", "fsdp"), (*BF16, "--attention=sdpa-efficient")),
    "flash": (("single", "zero2"), (*BF16, "--attention=sdpa-flash")),
    "window": (("single", "fsdp"), (*BF16, "--window=64")),
    "dropout": (("single", "fsdp", "zero2"), (*BF16, "--dropout=0.1")),
    "dropout-full": (
        ("single",),
        (*BF16, "--dropout=0.1", "--activation-checkpointing=full"),
    ),
    "fp32-dropout": (("single",), ("--precision=fp32", "--dropout=0.1")),
    "documents": (("single",), (*BF16, "--document-attention")),
    "mlp-tile": (("single", "fsdp", "zero3"), (*BF16, "--mlp-tile=256")),
    "loss-chunk": (("single",), (*BF16, "--loss-chunk=512")),
    "loss-whole": (("single",), (*BF16, "--loss-chunk=0")),
    "tf32": (("single",), ("--precision=tf32",)),
}
# What only some installations have: torchao, and a compiler of FlexAttention.
KERNELS = {
    "fp8": (("single", "fsdp"), ("--precision=fp8",)),
    "fp8-selective": (("single",), ("--precision=fp8", "--activation-checkpointing=selective")),
    "fp8-full": (("single",), ("--precision=fp8", "--activation-checkpointing=full")),
    "flex": (("single",), (*BF16, "--attention=flex", "--window=64")),
}
LIMITED = {
    "24GiB": (*BF16, "--model=seed-134m", "--micro-batch=250", "--memory-limit=24GiB"),
    "48GiB": (*BF16, "--model=seed-134m", "--micro-batch=500", "--memory-limit=48GiB"),
    "80GiB": (*BF16, "--model=seed-134m", "--micro-batch=850", "--memory-limit=80GiB"),
    "24GiB-full": (
        *(*BF16, "--model=seed-134m", "--micro-batch=1000", "--memory-limit=24GiB"),
        "--activation-checkpointing=full",
    ),
    "80GiB-gpt2-xl": (
        *(*BF16, "--model=gpt2-xl", "--micro-batch=16", "--memory-limit=80GiB"),
        "--activation-checkpointing=full",
    ),
}
LIMITED_STRATEGIES = ("single", "ddp", "fsdp", "zero2")
# Models and checkpointing, by the strategies that compile blocks.
COMPILED = {
    ("single", "ddp", "fsdp"): (("nano", "none"), ("seed", "none"), ("seed", "selective")),
    ("single", "fsdp"): (("seed", "full"), ("gpt2", "selective"), ("qwen3", "none")),
    ("single",): (("qwen3", "selective"), ("qwen3", "full"), ("llama", "none")),
}


@cache
def cases() -> tuple[Case, ...]:
    """All of them."""
    found = [
        case
        for number, (strategy, flags) in enumerate(STRATEGIES.items())
        for ranks, count in ((1, 5), (4, 2), (8, 1), (64, 1))
        if _is_possible(strategy, ranks)
        for case in _rows(strategy, flags, ranks, number + ranks, count)
    ]
    found += [
        _case(f"{strategy}-{technique}", strategy, (*MODELS["seed"], *flags))
        for technique, (strategies, flags) in TECHNIQUES.items()
        for strategy in strategies
    ]
    for ranks in (1, 8):
        found += [
            _case(f"{strategy}-{limit}-x{ranks}", strategy, flags, ranks=ranks)
            for limit, flags in LIMITED.items()
            for strategy in LIMITED_STRATEGIES
            if _is_possible(strategy, ranks)
        ]
    found += [
        _case(
            f"{strategy}-compile-{model}-{mode}",
            strategy,
            (*MODELS[model], *BF16, "--compile", f"--activation-checkpointing={mode}"),
        )
        for strategies, rows in COMPILED.items()
        for model, mode in rows
        for strategy in strategies
    ]
    fixed = [replace(case, name=f"{case.name}-fixed", expandable=False) for case in found[::8]]
    kernels = [
        _case(f"{strategy}-{kernel}", strategy, (*MODELS["seed"], *flags))
        for kernel, (strategies, flags) in KERNELS.items()
        for strategy in strategies
    ]
    return (*found, *fixed, *kernels)


def _is_possible(strategy: str, ranks: int) -> bool:
    if ranks == 1:
        return not strategy.startswith("fsdp-hybrid")
    return strategy != "single"


def _rows(strategy: str, flags: tuple[str, ...], ranks: int, first: int, count: int) -> list[Case]:
    # What is offloaded is really there, and really updated: small models only.
    some = OFFLOAD_ROWS if "offload" in strategy else ROWS
    rows = [some[(first + number) % len(some)] for number in range(min(count, len(some)))]
    found = []
    for precision, mode, accumulation, model in rows:
        micro_batch = int(MODELS[model][-1].split("=")[1]) if "=" in MODELS[model][-1] else 1
        found.append(
            _case(
                f"{strategy}-{precision[0].split('=')[1]}-{mode}-x{accumulation}-{model}-x{ranks}",
                strategy,
                (
                    *(*MODELS[model], *precision, f"--activation-checkpointing={mode}"),
                    f"--global-batch={micro_batch * accumulation * ranks}",
                ),
                ranks=ranks,
            )
        )
    return found


def _case(name: str, strategy: str, flags: tuple[str, ...], ranks: int = 1) -> Case:
    return Case(
        name=name,
        family=strategy.split("-")[0],
        flags=(*STRATEGIES[strategy], *flags, "--device=cuda"),
        ranks=ranks,
    )


EDGE = 0.1
EDGE_STRATEGIES = tuple(
    name for name in STRATEGIES if not {"hybrid", "offload", "zero0"} & {*name.split("-")}
)


def edge_cases(count: int, seed: int) -> list[Case]:
    """Small random runs, each with a share of what it is said to need as its limit."""
    draw = random.Random(seed)
    return [_edge_case(number, draw) for number in range(count)]


def _edge_case(number: int, draw: random.Random) -> Case:
    strategy = draw.choice(EDGE_STRATEGIES)
    accumulation, micro_batch = draw.choice((1, 2)), draw.choice((4, 8, 16))
    flags = (
        *draw.choice((BF16, BF16, ("--precision=fp32",), PURE)),
        f"--activation-checkpointing={draw.choice(('none', 'selective', 'full'))}",
        f"--layers={draw.randint(2, 8)}",
        f"--d-model={64 * draw.randint(3, 8)}",
        "--heads=4",
        f"--context={draw.choice((128, 256))}",
        f"--vocab-size={draw.choice((4096, 16384))}",
        f"--micro-batch={micro_batch}",
        f"--global-batch={micro_batch * accumulation}",
    )
    expandable = draw.choice((True, False))
    case = _case(f"edge-{number}-{strategy}", strategy, flags)
    return replace(case, expandable=expandable, limit_share=draw.uniform(1 - EDGE, 1 + EDGE))
