"""Which runs must give the same losses and gradient norms as one process."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 8
STEPS = 20
FEW_STEPS = 6
"""What is run of them where one thing is changed in what all of them are run of."""

STRATEGIES = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2"),
    "fsdp-hybrid-grad-op": ("--strategy=fsdp", "--replicate=2", "--no-reshard-after-forward"),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
}
OFFLOADS = {
    "zero1-offload": ("--zero=1", "--offload-optimizer=cpu"),
    "zero2-offload": ("--zero=2", "--offload-optimizer=cpu"),
    "zero3-offload": ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
    "fsdp-offload": ("--strategy=fsdp", "--offload-param=cpu"),
}
ODD_BUCKET = f"--deepspeed={Path(__file__).with_name('bucket-101.json')}"
ODD = ("--d-model=15", "--heads=3")  # an odd number of parameters in a block
ODD_VOCABULARY = ("--vocab-size=263", "--context=33")
_ROPE = ("--kv-heads=2", "--position=rope", "--norm=rms", "--activation=swiglu", "--d-ff=96")
_NO_BIASES = ("--attention-bias=False", "--mlp-bias=False")
FAMILIES = {
    "llama": (*_ROPE, *_NO_BIASES, "--tied=False"),
    "qwen3": (*_ROPE, *_NO_BIASES, "--head-dim=24", "--qk-norm=True", "--norm-eps=1e-6"),
}
# Adapters beside every projection of a small Qwen3, or of GPT-2's attention; alpha so large that
# they matter beside weights that nobody has trained.
ADAPTERS = {
    "lora-qwen3": (
        *FAMILIES["qwen3"],
        *(
            "--lora-rank=4",
            "--random-base",
            "--lora-targets=all",
            "--lora-alpha=64",
            "--lora-dropout=0",
        ),
    ),
    "lora-nf4": (
        *(
            *_ROPE,
            *_NO_BIASES,
            "--d-model=64",
            "--d-ff=128",
            "--lora-rank=4",
            "--random-base",
            "--lora-targets=all",
        ),
        *("--lora-alpha=64", "--quantize-base=nf4"),
    ),
    "lora-gpt2": ("--lora-rank=8", "--random-base", "--lora-alpha=64", "--rslora"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run on `ranks` processes, and the single-process run it must equal."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    reference: str
    loss_tolerance: float = 2e-5
    norm_tolerance: float | None = 1e-3
    steps: int = STEPS  # that are run
    masked: bool = False
    """Trains on completions, of which some sequences have a single byte."""

    def arguments(self, data: str) -> list[str]:
        """The command line of the run, less the model's size."""
        return [
            *self.flags,
            f"--data={Path(data).with_name('examples.jsonl') if self.masked else data}",
            f"--steps={STEPS}",
            f"--global-batch={GLOBAL_BATCH}",
            "--lr=3e-3",
            *("--schedule=cosine", "--min-lr-ratio=0.1", "--weight-decay=0.1"),
            "--seed=7",
        ]


def _case(
    strategy: str,
    flags: tuple[str, ...],
    *,
    ranks: int,
    accumulation: int = 1,
    family: str = "",
    tied: bool = True,
    checkpointing: str = "none",
    precision: str = "fp32",
    clip: float = 0.5,  # below the norms of this model, so that a wrong norm spoils the losses
    sequence: int = 1,
    tensor: int = 1,
) -> Case:
    words = [strategy, f"x{ranks}"]
    words += [f"sequence{sequence}"] if sequence > 1 else []
    words += [f"tensor{tensor}"] if tensor > 1 else []
    words += [family] if family else []
    words += [f"accumulate{accumulation}"] if accumulation > 1 else []
    words += [] if tied else ["untied"]
    words += [] if checkpointing == "none" else [checkpointing]
    words += [] if precision == "fp32" else [precision]
    words += [] if clip else ["unclipped"]
    low = precision == "bf16"
    again = sequence == ranks > 1 and checkpointing != "none"  # after a cut without
    again |= tensor > 1 and accumulation == 1
    return Case(
        name="-".join(words),
        ranks=ranks,
        flags=(
            *flags,
            f"--context-parallel={sequence}",
            f"--tensor-parallel={tensor}",
            f"--micro-batch={GLOBAL_BATCH * sequence * tensor // (ranks * accumulation)}",
            *({**FAMILIES, **ADAPTERS}[family] if family else (f"--tied={tied}",)),
            f"--activation-checkpointing={checkpointing}",
            f"--precision={precision}",
            f"--clip={clip}",
        ),
        reference=(family or ("tied" if tied else "untied")) + ("" if clip else "-unclipped"),
        # bf16 has 8 bits of mantissa, and DeepSpeed rounds even its starting weights to it; the
        # issue bounds bf16 losses only.
        loss_tolerance=2e-2 if low else 2e-5,
        norm_tolerance=None if low else 1e-3,
        steps=FEW_STEPS if low or family in FAMILIES or not clip or again else STEPS,
    )


def references() -> list[Case]:
    """Single-process runs: the whole batch at once, nothing recomputed, fp32."""
    return [
        Case(
            name=name,
            ranks=1,
            flags=("--strategy=single", f"--micro-batch={GLOBAL_BATCH}", *flags),
            reference=name,
        )
        for name, flags in (
            ("tied", ("--clip=0.5",)),
            ("untied", ("--clip=0.5", "--tied=False")),
            ("tied-unclipped", ("--clip=0",)),
            ("odd", ("--clip=0.5", *ODD)),
            ("odd-vocabulary", ("--clip=0.5", *ODD_VOCABULARY)),
            *((k, ("--clip=0.5", *flags)) for k, flags in {**FAMILIES, **ADAPTERS}.items()),
            ("lora-gpt2-unclipped", ("--clip=0", *ADAPTERS["lora-gpt2"])),
        )
    ] + [
        _masked("single", ("--strategy=single",), ranks=1, accumulation=1, documents=documents)
        for documents in (False, True)
    ]


def _masked(
    strategy: str,
    flags: tuple[str, ...],
    *,
    ranks: int,
    accumulation: int,
    documents: bool,
    precision: str = "fp32",
    sequence: int = 1,
    tensor: int = 1,
) -> Case:
    """Micro-batches whose means must not be averaged as they are."""
    suffix = "masked" + ("-documents" if documents else "")
    suffix += f"-sequence{sequence}" if sequence > 1 else ""
    suffix += f"-tensor{tensor}" if tensor > 1 else ""
    return Case(
        name=f"{strategy}-x{ranks}-accumulate{accumulation}-{suffix}-{precision}",
        ranks=ranks,
        flags=(
            *flags,
            f"--context-parallel={sequence}",
            f"--tensor-parallel={tensor}",
            f"--micro-batch={GLOBAL_BATCH * sequence * tensor // (ranks * accumulation)}",
            "--clip=0.5",
            f"--precision={precision}",
            f"--activation-checkpointing={'none' if precision == 'fp32' else 'selective'}",
            *(("--document-attention",) if documents else ()),
        ),
        reference=f"single-x1-accumulate1-masked{'-documents' if documents else ''}-fp32",
        loss_tolerance=2e-5 if precision == "fp32" else 2e-2,
        norm_tolerance=1e-3 if precision == "fp32" else None,
        steps=FEW_STEPS,
        masked=True,
    )


def _one_process() -> list[Case]:
    single = ("--strategy=single",)
    cases = [
        _case("single", single, ranks=1, accumulation=a, tied=t, checkpointing=c)
        for a, t, c in product((1, 2), (True, False), ("none", "selective", "full"))
        if (a, c) != (1, "none")  # that is the reference
    ]
    cases.append(_case("single", single, ranks=1, precision="bf16"))
    sharded = {k: v for k, v in STRATEGIES.items() if k != "ddp" and "hybrid" not in k}
    cases += [_case(k, v, ranks=1, accumulation=2) for k, v in sharded.items()]
    return cases


def _two_processes() -> list[Case]:
    # Every pair of accumulation, tying and checkpointing; the full product takes twice as long.
    pairwise = [(1, True, "none"), (2, False, "none"), (1, False, "selective")]
    pairwise += [(2, True, "selective"), (1, True, "full"), (2, False, "full")]
    cases = [
        _case(k, v, ranks=2, accumulation=a, tied=t, checkpointing=c)
        for (k, v), (a, t, c) in product(STRATEGIES.items(), pairwise)
    ]
    cases += [
        _case(k, v, ranks=2, accumulation=a, precision=p)
        for (k, v), (a, p) in product(OFFLOADS.items(), ((1, "fp32"), (2, "bf16")))
    ]
    cases += [_case(k, v, ranks=2, accumulation=2, precision="bf16") for k, v in STRATEGIES.items()]
    cases += [_case(k, v, ranks=2, clip=0) for k, v in STRATEGIES.items()]
    return cases


def _families() -> list[Case]:
    # Every pair of family, accumulation, checkpointing and precision.
    pairwise = [("llama", 2, "none", "fp32"), ("llama", 1, "selective", "fp32")]
    pairwise += [("llama", 2, "full", "bf16"), ("qwen3", 1, "full", "fp32")]
    pairwise += [("qwen3", 2, "selective", "bf16"), ("qwen3", 1, "none", "bf16")]
    cases = [
        _case(k, v, ranks=2, family=f, accumulation=a, checkpointing=c, precision=p)
        for (k, v), (f, a, c, p) in product(STRATEGIES.items(), pairwise)
    ]
    offloads = [("zero2", "llama", "fp32"), ("zero3", "qwen3", "fp32"), ("fsdp", "llama", "bf16")]
    for name, family, precision in offloads:
        key = f"{name}-offload"
        cases.append(_case(key, OFFLOADS[key], ranks=2, family=family, precision=precision))
    # Gradients accumulate in other buffers where half of the master weights stay on the device.
    half = ("--zero=3", "--offload-optimizer=cpu", "--offload-fraction=0.5")
    for precision, more in (("fp32", ()), ("bf16", ("--grad-accum-dtype=bf16",))):
        key, flags = "zero3-offload-half", (*half, *more)
        cases.append(
            _case(key, flags, ranks=2, family="qwen3", accumulation=2, precision=precision)
        )
    return cases


def _masked_prompts() -> list[Case]:
    return [
        _masked(k, v, ranks=2, accumulation=a, documents=documents)
        for (k, v), (a, documents) in product(STRATEGIES.items(), ((1, True), (4, False)))
    ] + [  # autocast, FSDP's policy and DeepSpeed's cast each have another type of attention
        _masked(k, STRATEGIES[k], ranks=2, accumulation=2, documents=True, precision="bf16")
        for k in ("ddp", "fsdp", "zero2")
    ]


def _odd_sizes() -> list[Case]:
    flags = (f"--micro-batch={GLOBAL_BATCH // 2}", "--clip=0.5")
    return [
        Case(name=f"{name}-{what}", ranks=2, flags=(*STRATEGIES[name], *flags, *odd), reference=ref)
        for name in ("zero1", "zero2", "zero3")
        for what, odd, ref in (("odd-model", ODD, "odd"), ("odd-bucket", (ODD_BUCKET,), "tied"))
    ]


def _tiled() -> list[Case]:
    """Tiles of the MLP that do not divide a micro-batch: DDP's buckets, FSDP's blocks, and ZeRO-3,
    which gathers parameters around each module that a tile calls."""
    pairwise: list[tuple[str, dict[str, Any]]] = [
        ("ddp", {"accumulation": 2, "checkpointing": "selective"}),
        ("fsdp", {"family": "llama", "checkpointing": "full"}),
        ("fsdp", {"accumulation": 2, "tied": False, "precision": "bf16"}),
        ("zero2", {"family": "qwen3", "checkpointing": "selective"}),
        ("zero3", {"accumulation": 2, "tied": False}),
        ("zero3", {"family": "llama", "checkpointing": "full"}),
        ("zero3", {"checkpointing": "selective", "precision": "bf16"}),
        ("fsdp", {"sequence": 2, "accumulation": 2, "tied": False}),
    ]
    return [
        _case(f"{k}-tiled", (*STRATEGIES[k], "--mlp-tile=13"), ranks=2, **options)
        for k, options in pairwise
    ]


def _partly_recomputed() -> list[Case]:
    """Some blocks, some products, or as many as a budget is enough for."""
    pairwise: list[tuple[str, dict[str, Any]]] = [
        ("ddp", {"checkpointing": "budget=200KiB"}),
        ("ddp", {"checkpointing": "keep=qkv", "accumulation": 2, "tied": False}),
        ("fsdp", {"checkpointing": "every=2"}),
        ("fsdp", {"checkpointing": "budget=700KiB", "family": "llama"}),
        ("zero1", {"checkpointing": "keep=attention,mlp-up", "accumulation": 2, "tied": False}),
        ("zero2", {"checkpointing": "every=2", "family": "qwen3"}),
        ("zero3", {"checkpointing": "budget=300KiB"}),
        ("zero3", {"checkpointing": "every=2", "accumulation": 2, "tied": False}),
        ("zero3", {"checkpointing": "keep=proj,mlp-up", "family": "llama"}),
        ("fsdp", {"checkpointing": "keep=qkv,mlp-up", "sequence": 2}),
    ]
    cases = [_case(k, STRATEGIES[k], ranks=2, **options) for k, options in pairwise]
    single, ring = ("--strategy=single",), ("--strategy=ddp", "--context-parallel-method=ring")
    cases += [_case("single", single, ranks=1, checkpointing=c) for c in ("every=2", "keep=proj")]
    cases += [
        _case("single", single, ranks=2, tensor=2, checkpointing=c)
        for c in ("keep=attention,mlp-up", "budget=200KiB")
    ]
    cases.append(_case("ddp-ring", ring, ranks=2, sequence=2, checkpointing="keep=mlp-up"))
    compiled = (*STRATEGIES["fsdp"], "--compile")
    cases.append(_case("fsdp-compiled", compiled, ranks=2, checkpointing="keep=qkv,attention"))
    return [replace(case, steps=FEW_STEPS) for case in cases]


def _four_processes() -> list[Case]:
    return [
        _case(k, v, ranks=4, accumulation=2, tied=False, checkpointing="selective")
        for k, v in STRATEGIES.items()
    ]


# Of what is cut: every pair of tying or family, accumulation, checkpointing and precision.
_PAIRWISE: list[dict[str, Any]] = [
    {"accumulation": 2, "tied": False},
    {"checkpointing": "selective"},
    {"accumulation": 2, "family": "llama", "checkpointing": "full"},
    {"family": "qwen3", "precision": "bf16", "checkpointing": "selective"},
]


def _cut_sequences() -> list[Case]:
    """Over 2 ranks alone, and beside 2 data ranks."""
    cases = [
        _case(k, v, ranks=ranks, sequence=2, **options)
        for (k, v), (number, options) in product(STRATEGIES.items(), enumerate(_PAIRWISE))
        for ranks in ((2, 4) if number == 0 else (2,))
        if k not in ("zero0", "fsdp-hybrid-grad-op")
    ]
    ring = ("--context-parallel-method=ring",)
    cases += [
        _case(f"{k}-ring", (*STRATEGIES[k], *ring), ranks=r, sequence=s, **options)
        for k, r, s, options in (
            ("ddp", 4, 4, _PAIRWISE[0]),
            ("fsdp", 4, 2, _PAIRWISE[1]),
            ("zero1", 4, 2, _PAIRWISE[0]),
            ("zero2", 4, 2, _PAIRWISE[1]),
            ("zero3", 4, 2, _PAIRWISE[2]),
            ("ddp", 2, 2, _PAIRWISE[3]),
            ("fsdp", 2, 2, _PAIRWISE[2]),
        )
    ]
    compiled = (*STRATEGIES["fsdp"], "--compile")
    cases.append(_case("fsdp-compiled", compiled, ranks=2, sequence=2))
    cases += [
        _masked(k, STRATEGIES[k], ranks=r, accumulation=2, documents=True, sequence=2)
        for k, r in (("ddp", 2), ("fsdp", 4), ("zero2", 2), ("zero3", 2))
    ]
    return cases


def _cut_matrices() -> list[Case]:
    """Over 2 ranks alone, beside 2 data ranks, and beside 2 ranks of a sequence."""
    single = ("--strategy=single",)
    cases = [_case("single", single, ranks=2, tensor=2, **options) for options in _PAIRWISE]
    rare = ("zero0", "fsdp-hybrid", "fsdp-hybrid-grad-op")
    cases += [
        _case(k, v, ranks=4, tensor=2, **_PAIRWISE[number])
        for offset, (k, v) in enumerate(STRATEGIES.items())
        for number in ({1 + offset % 3} if k in rare else {0, 1 + offset % 3})
    ]
    cases += [
        _case(k, OFFLOADS[k], ranks=4, tensor=2, tied=tied)
        for k, tied in (("zero3-offload", True), ("fsdp-offload", False))
    ]
    ring = ("--context-parallel-method=ring",)
    cases += [
        _case(k, (*flags, *method), ranks=4, tensor=2, sequence=2, accumulation=a)
        for k, flags, method, a in (
            ("ddp", STRATEGIES["ddp"], (), 2),
            ("fsdp-ring", STRATEGIES["fsdp"], ring, 1),
            ("zero3", STRATEGIES["zero3"], (), 1),
        )
    ]
    compiled = (*STRATEGIES["fsdp"], "--compile")
    cases.append(_case("fsdp-compiled", compiled, ranks=2, tensor=2))
    cases += [
        _case(f"{name}-in-backward", (*flags, "--optimizer-in-backward"), ranks=r, tensor=2, clip=0)
        for name, r, flags in (("single", 2, single), ("fsdp", 4, STRATEGIES["fsdp"]))
    ]
    cases.append(_case("zero1", STRATEGIES["zero1"], ranks=4, tensor=2, precision="bf16"))
    cases += [
        _masked(k, v, ranks=r, accumulation=2, documents=True, tensor=2)
        for k, v, r in (("single", single, 2), ("zero2", STRATEGIES["zero2"], 4))
    ]
    cases += [
        Case(
            name=f"{name}-tensor2-odd-vocabulary",
            ranks=ranks,
            flags=(*flags, "--tensor-parallel=2", "--micro-batch=4", "--clip=0.5", *ODD_VOCABULARY),
            reference="odd-vocabulary",
            steps=FEW_STEPS,
        )
        for name, ranks, flags in (
            ("single-x2", 2, single),
            ("zero2-x4", 4, STRATEGIES["zero2"]),
        )
    ]
    return cases


def _adapters() -> list[Case]:
    """Under every strategy; then what is kept, cast, offloaded, accumulated or cut otherwise."""
    cases = [_case(k, v, ranks=2, family="lora-qwen3") for k, v in STRATEGIES.items()]
    cases += [_case(k, v, ranks=2, family="lora-nf4") for k, v in STRATEGIES.items()]
    few = [
        _case("single", ("--strategy=single",), ranks=1, family="lora-gpt2", checkpointing="full"),
        *(
            _case(k, STRATEGIES[k], ranks=2, family="lora-gpt2", checkpointing=c, accumulation=a)
            for k, c, a in (
                ("ddp", "selective", 2),
                ("fsdp", "full", 2),
                ("zero2", "full", 2),
                ("zero3", "selective", 1),
            )
        ),
        *(_case(k, v, ranks=2, family="lora-qwen3") for k, v in OFFLOADS.items()),
        *(
            _case(k, STRATEGIES[k], ranks=2, family="lora-qwen3", precision="bf16", accumulation=2)
            for k in ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
        ),
        *(
            _case(k, STRATEGIES[k], ranks=2, family="lora-nf4", precision="bf16", checkpointing=c)
            for k, c in (("ddp", "selective"), ("fsdp", "full"), ("zero2", "none"))
        ),
        _case("zero3", STRATEGIES["zero3"], ranks=2, family="lora-nf4", precision="bf16"),
        *(
            _case(k, STRATEGIES[k], ranks=2, family=f, checkpointing=c)
            for k, f, c in (
                ("ddp", "lora-qwen3", "keep=attention,mlp-up"),
                ("fsdp", "lora-nf4", "selective"),
                ("fsdp", "lora-qwen3", "every=2"),
                ("zero3", "lora-qwen3", "keep=qkv,proj"),
                ("zero3", "lora-nf4", "budget=300KiB"),
            )
        ),
        _case("fsdp", STRATEGIES["fsdp"], ranks=2, family="lora-qwen3", sequence=2),
        _case("fsdp-compiled", (*STRATEGIES["fsdp"], "--compile"), ranks=2, family="lora-gpt2"),
        _case(
            "fsdp-in-backward",
            (*STRATEGIES["fsdp"], "--optimizer-in-backward"),
            ranks=2,
            family="lora-gpt2",
            clip=0,
        ),
    ]
    return cases + [replace(case, steps=FEW_STEPS) for case in few]


CASES = [
    *_one_process(),
    *_two_processes(),
    *_families(),
    *_masked_prompts(),
    *_odd_sizes(),
    *_cut_sequences(),
    *_cut_matrices(),
    *_tiled(),
    *_partly_recomputed(),
    *_adapters(),
    *_four_processes(),
]
