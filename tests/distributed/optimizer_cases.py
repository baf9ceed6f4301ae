"""Which optimizers and precisions train under which strategies, and how near to one process."""

from dataclasses import dataclass

BEFORE, AFTER = 3, 2  # steps until the save, and from there on
GLOBAL_BATCH = 8
MODEL_FLAGS = (
    "--layers=1",
    "--d-model=64",  # so that a rank's part of a matrix is large enough to be kept in 8 bits
    "--heads=2",
    "--context=16",
    "--vocab-size=261",  # does not divide by the ranks
    "--tokenizer=byte",
    "--device=cpu",
)
STRATEGIES = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
    "tensor": ("--strategy=single", "--tensor-parallel=2"),
}
NATIVE = ("ddp", "fsdp")
SHARDED = (*NATIVE, "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer in a precision. Tolerances are relative, of losses against one process."""

    name: str
    flags: tuple[str, ...]
    strategies: tuple[str, ...] = SHARDED
    parity: float = 2e-5
    resumed: float = 2e-5
    given: bool = False
    """Also trained from weights that are given, with a new optimizer: `--init-from`."""
    emulated_fp8: bool = False
    """Trains in fp8, which a CPU is refused: too slow for anything but a test."""


KINDS = {
    kind.name: kind
    for kind in (
        # Decay is a part of their moments.
        Kind(name="adam", flags=("--optimizer=adam", "--weight-decay=0.1"), given=True),
        Kind(name="sgd", flags=("--optimizer=sgd", "--lr=0.1"), given=True),
        Kind(
            name="sgd-plain",
            flags=("--optimizer=sgd", "--lr=0.1", "--momentum=0"),
            strategies=("fsdp", "zero2", "tensor"),
        ),
        Kind(
            name="adafactor",
            flags=("--optimizer=adafactor", "--lr=3e-2"),
            strategies=("ddp", "fsdp", "zero0"),
        ),
        # Its Newton-Schulz iteration computes in bf16, which rounds rows of FSDP elsewhere.
        Kind(
            name="muon", flags=("--optimizer=muon",), strategies=NATIVE, parity=1e-3, resumed=1e-3
        ),
        Kind(
            name="apollo",
            flags=("--optimizer=apollo", "--apollo-rank=8"),
            strategies=("ddp", "fsdp", "zero0"),
        ),
        # Blocks begin where a rank's range begins, so every sharding rounds the moments elsewhere.
        Kind(
            name="adamw8bit",
            flags=("--optimizer=adamw8bit",),
            strategies=(*SHARDED, "zero0", "zero1", "tensor"),
            parity=1e-4,
            resumed=1e-4,
        ),
        Kind(
            name="bf16-moments",
            flags=("--moments-dtype=bf16",),
            strategies=("fsdp", "zero2", "tensor"),
        ),
        Kind(
            name="bf16-pure",
            flags=("--precision=bf16-pure",),
            strategies=(*SHARDED, "zero1", "tensor"),
            parity=1e-3,
            resumed=1e-3,
        ),
        Kind(
            name="bf16-pure-bare",
            flags=("--precision=bf16-pure", "--no-compensation"),
            strategies=("ddp", "fsdp", "zero2"),
            parity=1e-3,
            resumed=1e-3,
        ),
        Kind(
            name="bf16-pure-8bit",
            flags=("--precision=bf16-pure", "--optimizer=adamw8bit"),
            strategies=("fsdp", "zero2"),
            parity=1e-3,
            resumed=1e-3,
        ),
        Kind(
            name="fp16",
            flags=("--precision=fp16",),
            strategies=(*NATIVE, "tensor"),
            parity=2e-3,
            resumed=2e-3,
        ),
        Kind(
            name="fp8",
            flags=("--precision=bf16",),
            strategies=NATIVE,
            parity=1e-2,
            resumed=1e-2,
            emulated_fp8=True,
        ),
        Kind(
            name="in-backward",
            flags=("--optimizer-in-backward", "--clip=0"),
            strategies=("fsdp",),
        ),
        Kind(
            name="in-backward-adafactor",
            flags=("--optimizer-in-backward", "--clip=0", "--optimizer=adafactor", "--lr=3e-2"),
            strategies=("fsdp",),
        ),
    )
}
PAIRS = [(kind, strategy) for kind in KINDS.values() for strategy in kind.strategies]


def arguments(kind: Kind, strategy: tuple[str, ...], text: str, *, ranks: int) -> list[str]:
    """The command line of one run."""
    return [
        *MODEL_FLAGS,
        *strategy,
        f"--data={text}",
        f"--steps={BEFORE + AFTER}",
        f"--micro-batch={GLOBAL_BATCH // ranks}",
        f"--global-batch={GLOBAL_BATCH}",
        "--lr=3e-3",
        "--clip=0.5",
        "--seed=7",
        *kind.flags,
    ]
