"""Activation checkpointing: reads `--activation-checkpointing` into one mode per block.

Imports no torch. A block's mode is one of none (keep everything), selective (all products),
`keep=` and some of them, full (only its input) and offload (that, in host memory).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal, get_args

from launcher.util.errors import UserError
from launcher.util.sizes import parse_bytes

ActivationCheckpointing = Literal["none", "selective", "full", "offload"]
"""Named modes that hold for all blocks of a model."""
NAMES: tuple[str, ...] = get_args(ActivationCheckpointing)
LINEARS = ("qkv", "proj", "mlp-up")
"""Linear products that backward asks for, in the order of a block. Of the last, the MLP's second,
it never does: that is only added to the residual stream."""
PRODUCTS = ("qkv", "attention", "proj", "mlp-up")
"""Results of a block's matmuls, without the last."""
_KEEP, _EVERY, _BUDGET = "keep=", "every=", "budget="
_CHOICES = f"{', '.join(NAMES)}, every=2, keep={','.join(PRODUCTS)} or budget=8GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """The choice for all blocks of a model."""

    text: str
    """The flag's value; one spelling for each choice."""
    pattern: tuple[str, ...] = ()
    """Modes of consecutive blocks, repeated over all blocks."""
    of_each: bool = False
    """The pattern names every block."""
    budget_bytes: int | None = None
    """Budget for saved activations of a micro-batch; the blocks' modes are not decided then
    (`launcher.forecast.budget`), and there is no pattern."""

    def blocks(self, layers: int) -> tuple[str, ...]:
        """Return the mode of each block.

        Raises:
            ValueError: the pattern is of another number of layers.
        """
        assert self.pattern, f"{self.text} has not been spent on blocks"
        size = len(self.pattern)
        if self.of_each and size != layers:
            raise ValueError(
                f"activation_checkpointing {self.text} is of {size} blocks and the model has "
                f"{layers}; name each once."
            )
        if size > layers:
            most = f"use 2 to {layers}, or full" if layers > 1 else "use full"
            raise ValueError(
                f"activation_checkpointing {self.text} recomputes none of {layers} blocks; {most}."
            )
        return (self.pattern * -(-layers // size))[:layers]

    @property
    def keeps_products(self) -> bool:
        """Return whether a block may keep some products and recompute the rest."""
        partial = any(kept_products(word) for word in self.pattern)
        return partial or self.budget_bytes is not None


@cache
def parse(text: str) -> Checkpointing:
    """Parse a value of the flag.

    Raises:
        ValueError: nothing, with the value and the fix.
    """
    if text.startswith(_EVERY):
        number = text.removeprefix(_EVERY)
        if not (_is_count(number) and int(number) >= 2):
            raise ValueError(
                f"activation_checkpointing {text} is not every=K with a whole number K from 2 on; "
                "use every=2 to recompute every second block, or full for all."
            )
        every = int(number)
        return Checkpointing(text=f"{_EVERY}{every}", pattern=(*(every - 1) * ("none",), "full"))
    if text.startswith(_BUDGET):
        try:
            size_bytes = parse_bytes(text.removeprefix(_BUDGET), "")
        except UserError:
            raise ValueError(
                f"activation_checkpointing {text} is not a size above 0; write for example "
                "budget=8GiB or budget=512MiB."
            ) from None
        return Checkpointing(text=text, budget_bytes=size_bytes)
    if "/" in text:
        return _of_each(text)
    return Checkpointing(text=(word := _block(text)), pattern=(word,))


def spelled(blocks: Sequence[str]) -> str:
    """Write the modes of all blocks as a value of the flag: `full:8/none:4`."""
    runs = [(word, len(list(same))) for word, same in groupby(blocks)]
    if len(runs) == 1:
        return runs[0][0]
    return "/".join(f"{word}:{count}" for word, count in runs)


def keeping(products: Collection[str]) -> str:
    """Return the mode of a block that keeps these products and recomputes all else."""
    if len(products) == len(PRODUCTS):
        return "selective"
    return _KEEP + ",".join(p for p in PRODUCTS if p in products) if products else "full"


@cache
def kept_products(word: str) -> tuple[str, ...]:
    """Return the products that a block of this mode keeps; none where it keeps everything or
    nothing."""
    if word == "selective":
        return PRODUCTS
    return tuple(word.removeprefix(_KEEP).split(",")) if word.startswith(_KEEP) else ()


def _block(text: str) -> str:
    """Normalize the mode of one block."""
    if not text.startswith(_KEEP):
        if text not in NAMES:
            raise ValueError(
                f"activation_checkpointing {text!r} is unknown; choose one of {_CHOICES}."
            )
        return text
    named = text.removeprefix(_KEEP).split(",")
    unknown = [name for name in named if name not in PRODUCTS]
    if unknown:
        raise ValueError(
            f"activation_checkpointing {text}: {unknown[0]!r} is no product that can be kept; "
            f"name some of {', '.join(PRODUCTS)}."
        )
    return keeping(named)


def _is_count(text: str) -> bool:
    """Return whether it is a number of blocks that a model could have."""
    return text.isascii() and text.isdigit() and len(text) <= 5


def _of_each(text: str) -> Checkpointing:
    """`full:8/none:4`, which is also how a budget that is spent is written down."""
    blocks: list[str] = []
    for run in text.split("/"):
        word, _, count = run.rpartition(":")
        if not (_is_count(count) and int(count) >= 1):
            raise ValueError(
                f"activation_checkpointing {text}: {run!r} is not a choice and a number of blocks; "
                "write for example full:8/none:4."
            )
        if _block(word) == "offload":
            raise ValueError(
                f"activation_checkpointing {text}: offload is for all blocks or none; "
                "use full instead."
            )
        blocks += int(count) * [_block(word)]
    return Checkpointing(text=spelled(blocks), pattern=tuple(blocks), of_each=True)
