"""Check that a decoder of transformers computes with shards of its matrices what it does with whole
ones: by its plan, and by a model without memory whose matrices are as narrow as shards."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import new_causal, skeleton
from launcher.model.foreign.matrices import (
    BY_COLUMNS,
    BY_ROWS,
    COLUMN,
    EXPERTS,
    PACKED,
    ROW,
    SUMMED,
    matrix_styles,
    shards_heads,
)

_KNOWN: Final = (*BY_ROWS, *BY_COLUMNS, SUMMED, EXPERTS)
_ROUTED: Final = ["self", "hidden_states", "top_k_index", "top_k_weights"]
"""Arguments of experts."""
_DROPS: Final = "drop"
"""In the names of attributes that say which share is dropped."""
_TOKENS: Final = (2, 8)
_EAGER: Final = "eager-without-masks"


def matrix_obstacle(config: ForeignConfig, number: int) -> str | None:
    """Return why its matrices cannot be in `number` shards, as the end of a sentence."""
    # No shard depends on what is recomputed, which a plan varies.
    return _obstacle(replace(config, activation_checkpointing="none", loss_chunk=None), number)


@lru_cache(maxsize=64)
def _obstacle(config: ForeignConfig, number: int) -> str | None:
    return next(_obstacles(config, number), None)


def _obstacles(config: ForeignConfig, number: int) -> Iterator[str]:
    styles = matrix_styles(config)
    if not styles:
        yield "has no plan that names them"
        return
    causal = skeleton(config.document, config.attention)
    modules = dict(causal.named_modules())
    experts = {name for name, style in styles.items() if style == EXPERTS}
    of_experts = {f"{name}.{own}" for name in experts for own in modules[name]._parameters}
    for name, style in styles.items():
        if style == EXPERTS:
            yield from _of_experts(name, modules[name], styles, number)
        elif name in of_experts:
            continue
        elif style not in _KNOWN:
            yield f"plans {name} as {style}, which is not known here"
        elif style != SUMMED and type(modules.get(name)) is not nn.Linear:
            yield f"plans {name} as {style}, and that is no Linear"
    for name, module in modules.items():
        if share := max(_dropped(module), default=0.0):
            yield f"drops {share:g} in {name}, and ranks would draw different masks"
    if shards_heads(config) and (config.heads % number or config.kv_head_count % number):
        yield f"has {config.heads} heads with {config.kv_head_count} of keys, which do not divide"
    for name, style in styles.items():
        linear = style in (*BY_ROWS, *BY_COLUMNS) and name in modules
        if linear and (size := _sharded_size(modules[name], style)) % number:
            yield f"has {size} features in {name}, which do not divide"
    yield from _obstacles_of_shards(config, number, styles)


def _of_experts(name: str, experts: Any, styles: Mapping[str, str], number: int) -> Iterator[str]:
    planned = {own: styles.get(f"{name}.{own}", "whole") for own in experts._parameters}
    known = sorted(planned.values()) == [PACKED, ROW]
    known &= [*inspect.signature(type(experts).forward).parameters] == _ROUTED
    if not (known and all(p.ndim == 3 for p in experts.parameters(recurse=False))):
        yield f"has experts of a kind that is not known here in {name}"
        return
    for own, style in planned.items():
        _, rows, columns = experts.get_parameter(own).shape
        if (size := rows // 2 if style == PACKED else columns) % number:
            yield f"has {size} features in each expert of {name}.{own}, which do not divide"


def _dropped(module: nn.Module) -> Iterator[float]:
    if isinstance(module, nn.Dropout):
        yield module.p
    yield from (v for n, v in vars(module).items() if _DROPS in n and isinstance(v, float))


def _sharded_size(linear: Any, style: str) -> int:
    size: int = linear.out_features if style in BY_ROWS else linear.in_features
    return size


def _obstacles_of_shards(
    config: ForeignConfig, number: int, styles: Mapping[str, str]
) -> Iterator[str]:
    """Run narrow matrices, and follow the gradients of what they make.

    Every path from the input of a row-wise matrix ends in column-wise ones: a parameter on another
    one would have summands of its gradient on several ranks, which a plan has to say.
    """
    with torch.device("meta"):
        causal = new_causal(config.document, config.attention)
        tokens = torch.zeros(_TOKENS, dtype=torch.int64)
    _without_values(causal)
    columns, inputs, sums = set[Any](), set[Any](), set[Any]()
    modules: dict[str, Any] = dict(causal.named_modules())
    for name, style in styles.items():
        linear: Any = modules.get(name)  # None of a parameter of experts
        if style == EXPERTS:  # which decide by values
            linear.forward = lambda hidden, *_: hidden.clone()
            linear.register_forward_hook(lambda _, args, out: sums.add(out.grad_fn))
        elif style == COLUMN:
            _narrow(linear, number, 0)
            linear.register_forward_hook(lambda _, args, out: columns.add(out.grad_fn))
        elif style == ROW and linear is not None:
            _narrow(linear, number, 1)
            linear.register_forward_pre_hook(lambda _, args: inputs.add(args[0].grad_fn))
            linear.register_forward_hook(lambda _, args, out: sums.add(out.grad_fn))
    try:
        hidden = causal.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    except Exception as error:  # its code may know whole matrices only, and raise anything
        yield f"does not compute with shards of them ({type(error).__name__}: {error})"
        return
    # From the output back, each path has to meet a sum before it meets columns of a shard.
    if not columns.isdisjoint(_reached([hidden.grad_fn], sums)):
        yield "sums up no shards behind one of them"
    names = {id(parameter): name for name, parameter in causal.named_parameters()}
    variables = (getattr(node, "variable", None) for node in _reached(inputs, columns))
    between = {names[id(each)] for each in variables if each is not None}
    planned = {name for name in names.values() if styles.get(name.rpartition(".")[0]) == SUMMED}
    for name in sorted(between ^ planned):
        yield (
            f"plans {name} as {SUMMED}, and whole tensors go through it"
            if name in planned
            else f"has {name} between shards of them, which it does not plan"
        )


def _narrow(linear: Any, number: int, axis: int) -> None:
    """Leave a Linear without memory a share of its inputs or outputs."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(number, axis)[0])
    if axis == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(number)[0])


def _without_values(causal: Any) -> None:
    """Let a model without memory take no decision by values: none of masks, none of the length of a
    sequence, by which some rotary frequencies go."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_EAGER, _attend)
    causal.config._attn_implementation = _EAGER
    for module in causal.modules():
        if (kinds := getattr(module, "rope_type", None)) is not None:
            named = isinstance(kinds, dict)
            module.rope_type = dict.fromkeys(kinds, "default") if named else "default"


def _attend(module: Any, *args: Any, **how: Any) -> tuple[Tensor, Tensor | None]:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor | None] = eager(module, *args, **how)
    return found


def _reached(nodes: Iterable[Any], ends: set[Any]) -> set[Any]:
    """Return the nodes of a graph of gradients that are reached from some, up to `ends`."""
    found: set[Any] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if node not in ends:
            left += [following for following, _ in node.next_functions]
    return found
