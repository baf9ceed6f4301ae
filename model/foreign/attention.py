"""Attention of decoders of transformers: whether another function can take its place, which sees
other tokens than the rest of a block does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from launcher.model.foreign.attention_calls import attention_calls, calls_attention, tree_of
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.foreign.decoder import skeleton
from launcher.model.parts import parts_of

_KNOWN: Final = frozenset(
    {None, "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids"}
)
"""Arguments of it that change no score by its head or token; None stands for **kwargs."""
SINKS: Final = "sinks"
SINKS_ARGUMENT: Final = "s_aux"
"""A score of each head that no value belongs to (arXiv:2309.17453): as attribute of a module with
attention, and as an argument of its function."""
_MASKS: Final = frozenset({"create_causal_mask", "create_sliding_window_causal_mask"})
_BY_LENGTH: Final = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the last position."""


def attention_modules(causal: Any) -> list[nn.Module]:
    """Return the modules of the blocks that call transformers' attention functions."""
    blocks = parts_of(causal).blocks
    return [module for module in blocks.modules() if calls_attention(module)]


def key_heads(causal: Any, heads: int) -> int | None:
    """Return the fewest heads of keys and values of any block; None where each head has its own."""
    shared = (getattr(m, "num_key_value_groups", 1) for m in attention_modules(causal))
    most = max(shared, default=1)
    return None if most == 1 else heads // most


def attention_obstacle(config: ForeignConfig) -> str | None:
    """Return why only whole sequences can be computed, as the end of a sentence, or None where
    nothing but transformers' attention functions goes from token to token."""
    if USERS in config.fields:
        return "computes attention in a way of its own"
    return next(_obstacles(config), None)


def _obstacles(config: ForeignConfig) -> Iterator[str]:
    causal = skeleton(config.document, config.attention)
    modules, forward = attention_modules(causal), type(causal.base_model).forward
    if config.attending_blocks < config.layers or getattr(causal, "_is_stateful", False):
        yield "carries a state from token to token"
    if len(modules) != config.layers:
        yield "computes attention in a way of its own"
    given = {k.arg for m in modules for k in attention_calls(m)[0].keywords if not _is_sinks(k)}
    for name in sorted(given - _KNOWN, key=str):
        yield f"gives each head {name} besides its queries, keys and values"
    if "position_ids" not in inspect.signature(forward).parameters:
        yield "takes no positions of its tokens"
    named = {node.id for node in ast.walk(tree_of(forward)) if isinstance(node, ast.Name)}
    if other := sorted(n for n in named - _MASKS if n.startswith("create_") and "mask" in n):
        yield f"makes masks by {other[0]}"
    for module in causal.modules():
        kinds = getattr(module, "rope_type", None) or ""
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _BY_LENGTH:
                yield f"has rotary positions of the type {kind}, by the length of a sequence"


def _is_sinks(keyword: ast.keyword) -> bool:
    return keyword.arg == SINKS_ARGUMENT and getattr(keyword.value, "attr", "") == SINKS
