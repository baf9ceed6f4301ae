"""Which runs must give the same losses and gradient norms as one process."""

from dataclasses import dataclass
from itertools import product

GLOBAL_BATCH = 8
STEPS = 20

STRATEGIES = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2"),
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
ODD = ("--d-model=15", "--heads=3")  # an odd number of parameters in a block


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of `STEPS` steps on `ranks` processes, and the single-process run it must equal."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    reference: str
    loss_tolerance: float = 2e-5
    norm_tolerance: float | None = 1e-3

    def arguments(self, data: str) -> list[str]:
        """The command line of the run, less the model's size."""
        return [
            *self.flags,
            f"--data={data}",
            f"--steps={STEPS}",
            f"--global-batch={GLOBAL_BATCH}",
            "--lr=3e-3",
            "--seed=7",
        ]


def _case(
    strategy: str,
    flags: tuple[str, ...],
    *,
    ranks: int,
    accumulation: int = 1,
    tied: bool = True,
    checkpointing: str = "none",
    precision: str = "fp32",
    clip: float = 0.5,  # below the norms of this model, so that a wrong norm spoils the losses
) -> Case:
    words = [strategy, f"x{ranks}"]
    words += [f"accumulate{accumulation}"] if accumulation > 1 else []
    words += [] if tied else ["untied"]
    words += [] if checkpointing == "none" else [checkpointing]
    words += [] if precision == "fp32" else [precision]
    words += [] if clip else ["unclipped"]
    low = precision == "bf16"
    return Case(
        name="-".join(words),
        ranks=ranks,
        flags=(
            *flags,
            f"--micro-batch={GLOBAL_BATCH // (ranks * accumulation)}",
            f"--tied={tied}",
            f"--activation-checkpointing={checkpointing}",
            f"--precision={precision}",
            f"--clip={clip}",
        ),
        reference=("tied" if tied else "untied") + ("" if clip else "-unclipped"),
        # bf16 has 8 bits of mantissa, and DeepSpeed rounds even its starting weights to it; the
        # issue bounds bf16 losses only.
        loss_tolerance=2e-2 if low else 2e-5,
        norm_tolerance=None if low else 1e-3,
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
        )
    ]


def _one_process() -> list[Case]:
    single = ("--strategy=single",)
    cases = [
        _case("single", single, ranks=1, accumulation=a, tied=t, checkpointing=c)
        for a, t, c in product((1, 2), (True, False), ("none", "selective", "full"))
        if (a, c) != (1, "none")  # that is the reference
    ]
    cases.append(_case("single", single, ranks=1, precision="bf16"))
    sharded = {k: v for k, v in STRATEGIES.items() if k not in ("ddp", "fsdp-hybrid")}
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


def _odd_sizes() -> list[Case]:
    flags = (f"--micro-batch={GLOBAL_BATCH // 2}", "--clip=0.5")
    return [
        Case(name=f"{name}-{what}", ranks=2, flags=(*STRATEGIES[name], *flags, *odd), reference=ref)
        for name in ("zero1", "zero2", "zero3")
        for what, odd, ref in (("odd-model", ODD, "odd"), ("odd-bucket", ("--bucket=101",), "tied"))
    ]


def _four_processes() -> list[Case]:
    return [
        _case(k, v, ranks=4, accumulation=2, tied=False, checkpointing="selective")
        for k, v in STRATEGIES.items()
    ]


CASES = [*_one_process(), *_two_processes(), *_odd_sizes(), *_four_processes()]
