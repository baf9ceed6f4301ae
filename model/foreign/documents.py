"""Documents of a sequence, as transformers' masks are to see them."""

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from torch import Tensor

_here = threading.local()


@contextlib.contextmanager
def separated_at(starts: Tensor | None) -> Iterator[None]:
    """Have masks of transformers keep attention in the documents that begin at `starts` [B, T];
    None for sequences that are one document each.

    It looks for documents in the positions (transformers 5.23's masking_utils.py): a device is
    waited for in every forward, only to hear what is known here.
    """
    _look_here()
    _here.starts = starts
    try:
        yield
    finally:
        del _here.starts


@cache
def _look_here() -> None:
    from transformers import masking_utils

    masks = cast(Any, masking_utils)
    theirs = masks.find_packed_sequence_indices

    def documents_of(position_ids: Tensor) -> Tensor | None:
        known: Tensor | None = _here.starts if hasattr(_here, "starts") else theirs(position_ids)
        return known

    masks.find_packed_sequence_indices = documents_of
