"""Which strategies' bytes are counted, and what besides their states may be alive."""

from dataclasses import dataclass
from typing import Any

RANKS = 4
INPUTS_BYTES = 1024 + 8  # two sequences of 32 tokens, the loss and its sum
MOMENTS = ("accumulating", "after_backward", "after_step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on `RANKS` processes, looked at in its second step."""

    name: str
    flags: tuple[str, ...]
    precision: str
    rope: bool = False
    """Whether the model is Qwen 3's kind, and not GPT-2's."""

    @property
    def strategy(self) -> str:
        """By its key below."""
        return self.name.removesuffix("-accumulating-bf16").removesuffix("-rope").rsplit("-", 1)[0]


_STRATEGIES = {
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-each": ("--strategy=fsdp", "--reduce-each-micro-batch"),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2"),
    "fsdp-hybrid-grad-op": ("--strategy=fsdp", "--replicate=2", "--no-reshard-after-forward"),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
}
_IN_BF16 = ("--grad-accum-dtype=bf16",)
ROPE: dict[str, Any] = {
    **{"kv_heads": 2, "head_dim": 24, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"d_ff": 96, "qk_norm": True, "bias": "qkv"},
}
_ROPE_FLAGS = tuple(f"--{name.replace('_', '-')}={value}" for name, value in ROPE.items())

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
    *(
        Case(name=f"{n}-{p}-rope", flags=_STRATEGIES[n] + _ROPE_FLAGS, precision=p, rope=True)
        for n, p in (("ddp", "bf16"), ("fsdp", "fp32"), ("zero1", "fp32"), ("zero2", "bf16"))
    ),
    *(
        Case(name=f"zero3-{p}-rope", flags=("--zero=3", *_ROPE_FLAGS), precision=p, rope=True)
        for p in ("fp32", "bf16")
    ),
]
