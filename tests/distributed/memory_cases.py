"""Which strategies' bytes are counted, and what besides their states may be alive."""

from dataclasses import dataclass

RANKS = 4
INPUTS_BYTES = 1024  # two sequences of 32 tokens, and scalars
MOMENTS = ("accumulating", "after_backward", "after_step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on `RANKS` processes, looked at in its second step."""

    name: str
    flags: tuple[str, ...]
    precision: str


_STRATEGIES = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-each": ("--strategy=fsdp", "--reduce-each-micro-batch"),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2"),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
}
_IN_BF16 = ("--grad-accum-dtype=bf16",)

CASES = [
    *(
        Case(name=f"{name}-{precision}", flags=flags, precision=precision)
        for precision in ("fp32", "bf16")
        for name, flags in _STRATEGIES.items()
    ),
    *(
        Case(name=f"{n}-bf16-accumulating-bf16", flags=_STRATEGIES[n] + _IN_BF16, precision="bf16")
        for n in ("zero1", "zero2", "zero3")
    ),
]
