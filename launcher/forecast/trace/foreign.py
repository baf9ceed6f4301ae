"""Decoders of transformers on fake tensors: decisions that it takes by values, and kernels that
fake tensors lack."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig


@contextlib.contextmanager
def as_with_values(model: ModelConfig, dtype: torch.dtype) -> Iterator[None]:
    """Have transformers allocate on fake tensors what it does on real ones; nothing for our own
    decoder.

    It looks for packed documents in the positions, of which our sequences have none, and takes a
    T x T mask where it cannot look (transformers 5.23's masking_utils.py). Grouped products of
    experts are faked in bf16 only; its own form of them has the same results.
    """
    if not isinstance(model, ForeignConfig):
        yield
        return
    from transformers import masking_utils
    from transformers.integrations import moe

    masks, experts = cast(Any, masking_utils), cast(Any, moe)
    packed, grouped = masks.find_packed_sequence_indices, experts._can_use_grouped_mm
    masks.find_packed_sequence_indices = lambda position_ids: None
    if dtype != torch.bfloat16:
        experts._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, experts._can_use_grouped_mm = packed, grouped
