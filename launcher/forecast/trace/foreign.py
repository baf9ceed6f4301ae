"""Decoders of transformers in a trace: blocks that compute the same, and kernels that fake tensors
lack."""

import contextlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from launcher.forecast.trace.patched import patched
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.foreign.decoder import skeleton
from launcher.model.parts import parts_of

_LAYERS: Final = "num_hidden_layers"
_NUMBER: Final = frozenset({"layer_idx", "layer_id", "layer_number"})
"""Attributes of a module that say which block it is in."""


@cache
def block_kinds(model: ForeignConfig) -> tuple[str, ...]:
    """Return for each block what it is made of: blocks of which it is equal compute the same."""
    blocks = parts_of(skeleton(model.document, model.attention)).blocks
    return tuple(json.dumps([_described(*named) for named in b.named_modules()]) for b in blocks)


def _described(path: str, module: nn.Module) -> list[Any]:
    shapes = [(n, list(p.shape)) for n, p in module._parameters.items() if p is not None]
    settings = {
        name: value
        for name, value in vars(module).items()
        if name not in _NUMBER and isinstance(value, bool | int | float | str | None)
    }
    return [path, type(module).__qualname__, shapes, settings]


def with_blocks(model: ForeignConfig, numbers: Sequence[int]) -> ForeignConfig | None:
    """Return the model with some of its blocks alone, or None if its config cannot say so.

    Lists of a config that are as long as the model is deep have an entry per block.
    """
    config = skeleton(model.document, model.attention).config
    if config is None:  # of a user's own decoder, whose fields have any names
        return None
    fields = config.to_dict()
    chosen = {
        name: [value[n] for n in numbers]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == model.layers
    }
    fields |= {**chosen, config.attribute_map.get(_LAYERS, _LAYERS): len(numbers)}
    few = replace(model, document=json.dumps(fields, sort_keys=True), layers=len(numbers))
    kinds = block_kinds(model)
    return few if block_kinds(few) == tuple(kinds[n] for n in numbers) else None


def fake_experts(model: ModelConfig, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Give transformers grouped products of experts on fake tensors: torch fakes its own in bf16
    only. Nothing for our own decoder."""
    if dtype == torch.bfloat16 or not isinstance(model, ForeignConfig) or USERS in model.fields:
        return contextlib.nullcontext()
    from transformers.integrations import moe

    def grouped(rows: Tensor, weight: Tensor, offs: Tensor) -> Any:
        return _GroupedProduct.apply(rows, weight, offs)

    return patched((moe, "_grouped_mm", grouped))


class _GroupedProduct(torch.autograd.Function):
    """Rows [S, in], of which each is sent to one of the matrices [experts, in, out] -> [S, out].

    It keeps what torch's own does, which computes no gradient that is not asked for, of
    transformers' operators, which have fake forms.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        ctx.offs = offs
        rows = rows.to(weight.dtype)
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        out: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, offs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        if rows is None:  # frozen experts
            product = torch.ops.transformers.grouped_mm_fallback
            return product(grad, weight.mT, ctx.offs), None, None
        both = torch.ops.transformers.grouped_mm_fallback_backward
        return (*both(rows, weight, ctx.offs, grad), None)
