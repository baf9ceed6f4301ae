"""Functions of transformers 5.24 that do otherwise here; where a version lacks one, nothing."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from launcher.model.derived import seen

_here = threading.local()


@contextlib.contextmanager
def separated_at(starts: Tensor | None) -> Iterator[None]:
    """Have masks keep attention in the documents that begin at `starts` [B, T]; None for sequences
    that are one document each.

    transformers looks for documents in the positions: a device is waited for in every forward, only
    to hear what is known here.
    """
    _here.starts = starts
    try:
        yield
    finally:
        del _here.starts


@cache
def patch_transformers() -> None:
    """Have its masks ask `separated_at`, its grouped experts heed autocast, and its fused attention
    be seen by selective checkpointing."""
    from transformers import masking_utils
    from transformers.integrations import moe
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    _replace(masking_utils, "find_packed_sequence_indices", _documents)
    _replace(moe, "_grouped_mm", _product)
    if "sdpa" in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", seen(ALL_ATTENTION_FUNCTIONS["sdpa"]))


def _replace(module: ModuleType, name: str, by: Callable[..., Any]) -> None:
    if (theirs := getattr(module, name, None)) is not None:
        setattr(module, name, partial(by, theirs))


def _documents(theirs: Callable[..., Any], position_ids: Tensor) -> Tensor | None:
    known: Tensor | None = _here.starts if hasattr(_here, "starts") else theirs(position_ids)
    return known


def _product(theirs: Callable[..., Any], rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    # torch's grouped product is none of autocast's operators, unlike the linear layers that
    # transformers takes one by one where it does not group.
    if torch.is_autocast_enabled(rows.device.type):
        weight = weight.to(torch.get_autocast_dtype(rows.device.type))
    product: Tensor = theirs(rows, weight, offs=offs)
    return product
