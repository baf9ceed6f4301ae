"""Which runs the prediction is held against."""

from dataclasses import dataclass, replace

STRATEGIES = {
    "single": ("--strategy=single",),
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2"),
    "fsdp-hybrid-grad-op": ("--strategy=fsdp", "--replicate=2", "--no-reshard-after-forward"),
    "fsdp-each": ("--strategy=fsdp", "--reduce-each-micro-batch"),
    "fsdp-offload": ("--strategy=fsdp", "--offload-param=cpu"),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
    "zero1-offload": ("--zero=1", "--offload-optimizer=cpu"),
    "zero2-offload": ("--zero=2", "--offload-optimizer=cpu"),
    "zero3-offload": ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
}
_ROPE = (
    *("--position=rope", "--norm=rms", "--activation=swiglu"),
    "--bias=none",
)
_QK_NORM = ("--qk-norm=True", "--tied=True", "--norm-eps=1e-6")
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    # One that every number of ranks divides, and one that none does.
    "cpu": {
        "even": ("--layers=4", "--d-model=96", "--heads=4", "--context=64", "--vocab-size=512"),
        "odd": (
            *("--layers=6", "--d-model=66", "--heads=3", "--context=48", "--vocab-size=1021"),
            "--tied=False",
        ),
        "llama": (
            *("--layers=4", "--d-model=96", "--heads=4", "--kv-heads=2", "--d-ff=256"),
            *("--context=64", "--vocab-size=512", "--tied=False", *_ROPE),
        ),
        "blocks-of-64": (
            *("--layers=5", "--d-model=128", "--heads=4", "--kv-heads=2", "--d-ff=192"),
            *("--context=48", "--vocab-size=509", "--tied=False", *_ROPE),
        ),
        "qwen3": (
            *("--layers=6", "--d-model=66", "--heads=6", "--kv-heads=3", "--head-dim=14"),
            *("--d-ff=182", "--context=48", "--vocab-size=1021", *_ROPE, *_QK_NORM),
        ),
    },
    "cuda": {
        "even": ("--model=gpt2", "--layers=8", "--vocab-size=32000"),
        "odd": ("--model=gpt2", "--layers=12", "--tied=False"),
        "llama": ("--model=llama-3.2-1b", "--layers=4", "--seq-len=1024", "--tied=False"),
        "qwen3": ("--model=qwen3-0.6b", "--layers=6", "--seq-len=1024"),
        "blocks-of-64": ("--model=qwen3-0.6b", "--layers=5", "--seq-len=512"),
    },
}
# Precision with checkpointing in full; accumulation and shape so that every pair occurs.
ROWS = (
    ("fp32", "none", 1, "even"),
    ("bf16", "none", 2, "odd"),
    ("fp32", "selective", 2, "even"),
    ("bf16", "selective", 1, "odd"),
    ("fp32", "full", 2, "odd"),
    ("bf16", "full", 1, "even"),
)
# The same for the other families, on two ranks.
FAMILY_ROWS = (
    ("fp32", "none", 2, "llama"),
    ("bf16", "selective", 1, "llama"),
    ("bf16", "full", 2, "llama"),
    ("bf16", "none", 1, "qwen3"),
    ("fp32", "selective", 2, "qwen3"),
)
# Sequences cut over two ranks, which read the same.
SEQUENCE_ROWS = (
    ("fp32", "none", 2, "even"),
    ("bf16", "selective", 1, "llama"),
    ("fp32", "full", 1, "llama"),
    ("bf16", "none", 1, "even"),
)
RING = "--context-parallel-method=ring"
RING_ROWS = (("fp32", "selective", 1, "even"), ("bf16", "full", 2, "llama"))
CUT = ("ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3", "zero3-offload")
MICRO_BATCH = 4
# What changes states or temporaries beside precision and checkpointing; on two ranks.
TECHNIQUES = {
    "bf16-pure": (("ddp", "fsdp", "zero1", "zero2", "zero3"), ("--precision=bf16-pure",)),
    "bf16-pure-bare": (("ddp", "fsdp"), ("--precision=bf16-pure", "--no-compensation")),
    "bf16-moments": (
        ("ddp", "fsdp", "zero2", "zero3"),
        ("--moments-dtype=bf16", "--betas", "0.9", "0.99"),
    ),
    "adamw8bit": (("ddp", "fsdp", "zero1", "zero2", "zero3"), ("--optimizer=adamw8bit",)),
    "adafactor": (("ddp", "fsdp"), ("--optimizer=adafactor",)),
    "apollo": (("ddp", "fsdp"), ("--optimizer=apollo", "--apollo-rank=8")),
    "sgd": (("ddp", "fsdp", "zero2"), ("--optimizer=sgd",)),
    "in-backward": (
        ("fsdp", "fsdp-grad-op", "fsdp-hybrid"),
        ("--optimizer-in-backward", "--clip=0"),
    ),
    "offload-half": (("zero3",), ("--offload-optimizer=cpu", "--offload-fraction=0.5")),
    "eager": (("ddp",), ("--attention=eager",)),
    "window": (("fsdp",), ("--window=16",)),
    "mlp-tile": (("ddp", "fsdp", "zero2", "zero3"), ("--mlp-tile=24",)),
    "mlp-tile-selective": (
        ("fsdp", "zero3"),
        ("--mlp-tile=24", "--activation-checkpointing=selective", "--precision=bf16"),
    ),
    "mlp-tile-full": (
        ("ddp", "zero3"),
        ("--mlp-tile=24", "--activation-checkpointing=full", "--precision=bf16"),
    ),
    "every-2": (("ddp", "fsdp", "zero2", "zero3"), ("--activation-checkpointing=every=2",)),
    "every-3-bf16": (
        ("fsdp", "zero3"),
        ("--activation-checkpointing=every=3", "--precision=bf16"),
    ),
    "every-2-tiles": (("ddp", "zero3"), ("--activation-checkpointing=every=2", "--mlp-tile=24")),
    "keep": (("ddp", "fsdp", "zero3"), ("--activation-checkpointing=keep=qkv,mlp-up",)),
    "keep-bf16": (
        ("fsdp", "zero1", "zero3"),
        ("--activation-checkpointing=keep=attention,proj", "--precision=bf16"),
    ),
    "keep-sequence": (
        ("fsdp", "zero2"),
        ("--activation-checkpointing=keep=attention,mlp-up", "--context-parallel=2"),
    ),
    "budget": (
        ("ddp", "fsdp", "zero1", "zero2", "zero3"),
        ("--activation-checkpointing=budget=3MiB",),
    ),
    "budget-bf16": (
        ("ddp", "fsdp", "zero2", "zero3"),
        ("--activation-checkpointing=budget=1MiB", "--precision=bf16"),
    ),
    "budget-tensor": (
        ("single", "zero3"),
        ("--activation-checkpointing=budget=1MiB", "--tensor-parallel=2"),
    ),
}
# Adapters beside frozen weights: a row of the others, and what is trained.
_LORA = ("--lora-rank=8", "--random-base")
_EVERYWHERE = ("--lora-rank=4", "--lora-targets=all", "--random-base")
LORA_ROWS: tuple[tuple[tuple[str, str, int, str], tuple[str, ...]], ...] = (
    (("fp32", "none", 1, "even"), _LORA),
    (("bf16", "selective", 2, "llama"), _EVERYWHERE),
    (("bf16", "full", 1, "qwen3"), _LORA),
    (("fp32", "full", 2, "odd"), (*_EVERYWHERE, "--lora-dropout=0.1")),
    (("bf16", "none", 2, "odd"), _EVERYWHERE),
    (("bf16", "none", 1, "blocks-of-64"), (*_EVERYWHERE, "--quantize-base=nf4")),
    (("fp32", "selective", 2, "blocks-of-64"), (*_LORA, "--quantize-base=nf4")),
    (("bf16", "full", 1, "blocks-of-64"), (*_LORA, "--quantize-base=int8")),
)
LORA_STRATEGIES = (
    *("ddp", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-hybrid-grad-op"),
    *("zero0", "zero1", "zero2", "zero3"),
)
LORA_OFFLOADS = ("fsdp-offload", "zero1-offload", "zero2-offload", "zero3-offload")
IN_BACKWARD = ("--optimizer-in-backward", "--clip=0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; its name says it all."""

    name: str
    family: str
    flags: tuple[str, ...]


def cases_for(ranks: int, device: str) -> list[Case]:
    """Cases of one world size: all rows on two ranks (or any pretended size), a part on others."""
    everything = ranks == 2 or device == "cuda"
    rows = (*ROWS, *FAMILY_ROWS) if everything else (ROWS[1], ROWS[4], FAMILY_ROWS[3])
    cases = []
    for strategy, flags in STRATEGIES.items():
        single = strategy == "single"
        if (single and ranks > 1) or (strategy.startswith("fsdp-hybrid") and ranks == 1):
            continue
        for row in (*ROWS, *FAMILY_ROWS) if single else rows:
            cases.append(_case(strategy, flags, row, ranks, device))
    if device == "cpu" and ranks > 1:
        some = SEQUENCE_ROWS if everything else SEQUENCE_ROWS[:2]
        cases += [
            _case(s, STRATEGIES[s], row, ranks, device, sequence=2) for s in CUT for row in some
        ]
        cases += [
            _case(
                f"{s}-ring",
                (*STRATEGIES[s], "--context-parallel-method=ring"),
                row,
                ranks,
                device,
                ranks,
            )
            for s in ("ddp", "fsdp", "zero2", "zero3")
            for row in RING_ROWS
        ]
        names = ("single",) if ranks == 2 else CUT
        cases += [
            _case(s, STRATEGIES[s], row, ranks, device, tensor=2)
            for s in names
            for row in SEQUENCE_ROWS
        ]
        cases += [
            _case(s, STRATEGIES[s], row, ranks, device, sequence=2, tensor=2)
            for s in ("ddp", "fsdp", "zero2", "zero3")
            for row in SEQUENCE_ROWS[:2]
            if ranks == 4
        ]
    if ranks == 2:
        for technique, (strategies, flags) in TECHNIQUES.items():
            for strategy in strategies:
                cases.append(_technique_case(technique, strategy, flags, device))
    return [*cases, *_lora_cases(ranks, device)]


def _lora_cases(ranks: int, device: str) -> list[Case]:
    """All rows on two ranks, a part on others."""
    everything = ranks == 2 or device == "cuda"
    rows = LORA_ROWS if everything else LORA_ROWS[1:3]
    names = [s for s in LORA_STRATEGIES if ranks > 1 or "hybrid" not in s]
    found = [("", s, row, more) for s in names for row, more in rows]
    if ranks == 1:
        found += [("", "single", row, more) for row, more in LORA_ROWS]
        found += [("-in-backward", "single", LORA_ROWS[2][0], (*_EVERYWHERE, *IN_BACKWARD))]
    else:
        found += [("", s, *row) for s in LORA_OFFLOADS for row in rows[:2]]
        row, more = LORA_ROWS[0]
        for name in ("fsdp", "fsdp-hybrid"):
            found += [("-in-backward", name, row, (*more, *IN_BACKWARD))]
    cases = []
    for suffix, strategy, row, more in found:
        case = _case(strategy, (*STRATEGIES[strategy], *more), row, ranks, device)
        cases.append(replace(case, name=f"{case.name}{suffix}-lora", family="lora"))
    return cases


def _technique_case(technique: str, strategy: str, flags: tuple[str, ...], device: str) -> Case:
    row = _case(strategy, STRATEGIES[strategy], ROWS[0], 2, device)
    kept = [f for f in row.flags if f.split("=")[0] not in {g.split("=")[0] for g in flags}]
    return Case(name=f"{strategy}-{technique}-technique", family=row.family, flags=(*kept, *flags))


def _case(
    strategy: str,
    flags: tuple[str, ...],
    row: tuple[str, str, int, str],
    ranks: int,
    device: str,
    sequence: int = 1,
    tensor: int = 1,
) -> Case:
    precision, checkpointing, accumulation, shape = row
    cut = f"-sequence{sequence}" if sequence > 1 else ""
    cut += f"-tensor{tensor}" if tensor > 1 else ""
    return Case(
        name=f"{strategy}-{precision}-{checkpointing}-accumulate{accumulation}-{shape}{cut}",
        family=strategy.split("-")[0],
        flags=(
            *flags,
            *SHAPES[device][shape],
            f"--precision={precision}",
            f"--activation-checkpointing={checkpointing}",
            f"--micro-batch={MICRO_BATCH}",
            f"--global-batch={MICRO_BATCH * accumulation * ranks // (sequence * tensor)}",
            f"--context-parallel={sequence}",
            f"--tensor-parallel={tensor}",
            f"--device={device}",
        ),
    )
