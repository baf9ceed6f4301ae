"""Which runs hold the masks of a pruned model."""

from dataclasses import dataclass

RANKS = 2
STEPS, SAVED = 18, 10
FEW_STEPS = 6
GLOBAL_BATCH = 4

# Nothing divides by 8: pieces begin and end inside bytes.
SHAPE = (
    *("--layers=2", "--d-model=15", "--heads=3", "--context=33", "--vocab-size=263"),
    *("--tokenizer=byte", "--device=cpu"),
)
_BF16 = "--precision=bf16"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on two ranks that begins with the pruned model."""

    name: str
    flags: tuple[str, ...]
    exact: bool = True
    """Whether its losses are those of the single process."""

    def arguments(self, data: str, pruned: str, ranks: int) -> list[str]:
        steps = STEPS if self.exact else SAVED
        return [
            *(f"--init-from={pruned}", f"--data={data}", "--device=cpu", "--seed=7"),
            *("--lr=1e-3", f"--steps={steps}", f"--global-batch={GLOBAL_BATCH}"),
            *(f"--micro-batch={GLOBAL_BATCH // ranks}", *self.flags),
        ]


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
REFERENCE = Case(name="single", flags=("--strategy=single",))
VARIANTS = tuple(Case(name=name, flags=flags) for name, flags in STRATEGIES.items())
_OTHERS = {
    "zero2-offload": ("--zero=2", "--offload-optimizer=cpu"),
    "zero3-offload": ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
    "fsdp-offload": ("--strategy=fsdp", "--offload-param=cpu"),
    "fsdp-bf16": ("--strategy=fsdp", _BF16),
    "zero1-bf16": ("--zero=1", _BF16),
    "zero2-bf16": ("--zero=2", _BF16),
    "zero3-bf16": ("--zero=3", _BF16),
    "zero3-fraction": ("--zero=3", "--offload-optimizer=cpu", "--offload-fraction=0.5"),
    "ddp-bf16-pure": ("--strategy=ddp", "--precision=bf16-pure"),
    "fsdp-bf16-pure": ("--strategy=fsdp", "--precision=bf16-pure"),
    "fsdp-in-backward": ("--strategy=fsdp", "--optimizer-in-backward", "--clip=0"),
    "ddp-muon": ("--strategy=ddp", "--optimizer=muon"),
    "fsdp-adafactor": ("--strategy=fsdp", "--optimizer=adafactor"),
    "zero2-8bit": ("--zero=2", "--optimizer=adamw8bit"),
    "zero3-sequences": ("--zero=3", "--context-parallel=2", "--micro-batch=4", "--seq-len=32"),
}
OTHERS = tuple(Case(name=name, flags=flags, exact=False) for name, flags in _OTHERS.items())
BY_NAME = {case.name: case for case in (REFERENCE, *VARIANTS, *OTHERS)}


def source_of(case: Case) -> Case:
    """Return the variant whose checkpoint this one goes on from: the one before it."""
    return VARIANTS[VARIANTS.index(case) - 1]
