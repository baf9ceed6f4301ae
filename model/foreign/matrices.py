"""Matrices of a decoder of transformers in equal shards, by the plan of names that it comes with:
which, and whether a shard has some of their rows or of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Final, Literal

import torch
from torch import nn

from launcher.model.foreign.attention import attention_modules
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.foreign.conversion import PREFIX
from launcher.model.foreign.decoder import skeleton
from launcher.model.parts import block_of
from launcher.util.sizes import even_part

COLUMN: Final = "colwise"
ROW: Final = "rowwise"
GATHERED: Final = "colwise_gather_output"
SPLIT: Final = "rowwise_split_input"
SUMMED: Final = "replicated_with_grad_allreduce"
"""Styles, in transformers' words. A column-wise Linear has some of its outputs, a row-wise one some
of its inputs and a summand of its outputs. What lies between both and is summed is whole: only its
gradient has a summand on each rank."""
EXPERTS: Final = "moe_tp_experts"
PACKED: Final = "packed_colwise"
"""Styles of a module of experts, and of its first parameter [experts, 2 * width, in], a gate and
what it multiplies; the second one, [experts, out, width], is row-wise. Each rank has some of the
width of every expert, and a summand of their outputs."""
VOCABULARY: Final = "embedding_rowwise"
"""Style of the input embedding, which has some of its rows with every plan."""
BY_ROWS: Final = (COLUMN, GATHERED)
BY_COLUMNS: Final = (ROW, SPLIT)

Axis = Literal["rows", "columns", "packed"]
"""Some rows, some columns, or as many rows of both halves of every expert."""
Part = tuple[int, int]
"""Index of a shard, and how many there are."""


def matrix_styles(config: ForeignConfig) -> Mapping[str, str]:
    """Return the style of each module, or parameter, that the plan names."""
    return {} if USERS in config.fields else _styles(config.document, config.attention)


@lru_cache(maxsize=8)
def _styles(document: str, attention: str) -> dict[str, str]:
    causal = skeleton(document, attention)
    plan = causal.config.base_model_tp_plan or {}
    # In a plan * stands for the number of a layer.
    patterns = {
        re.compile(re.escape(f"{causal.base_model_prefix}.{name}").replace(r"\*", r"\d+")): style
        for name, style in plan.items()
    }
    embedding = causal.get_input_embeddings()
    return {
        name: style
        for name, named in chain(causal.named_modules(), causal.named_parameters())
        for pattern, style in patterns.items()
        if pattern.fullmatch(name) and not (style == VOCABULARY and named is embedding)
    }


def shard_axis(name: str, config: ForeignConfig) -> Axis | None:
    """Return what a shard has some of, of the parameter `name`; None where each is whole."""
    return _axes(config.document, config.attention).get(name)


@lru_cache(maxsize=8)
def _axes(document: str, attention: str) -> dict[str, Axis]:
    causal, styles = skeleton(document, attention), _styles(document, attention)
    head = causal.get_output_embeddings()
    vocabulary = [causal.get_input_embeddings().weight, head.weight, head.bias]
    found: dict[str, Axis] = {}
    for name, parameter in causal.named_parameters():
        module, _, own_name = name.rpartition(".")
        style = styles.get(module)
        if style == EXPERTS:
            found[PREFIX + name] = "packed" if styles[name] == PACKED else "columns"
        elif style in BY_ROWS or any(parameter is each for each in vocabulary):
            found[PREFIX + name] = "rows"
        elif style in BY_COLUMNS and own_name == "weight":
            found[PREFIX + name] = "columns"
    return found


def local_shape(
    name: str, shape: tuple[int, ...], config: ForeignConfig, part: Part
) -> tuple[int, ...]:
    """Return the shape of a shard of the parameter `name`."""
    axis = shard_axis(name, config)
    if axis is None:
        return shape
    at, times = {"rows": (0, 1), "columns": (len(shape) - 1, 1), "packed": (1, 2)}[axis]
    begin, end = even_part(shape[at] // times, *part)
    return (*shape[:at], times * (end - begin), *shape[at + 1 :])


@lru_cache(maxsize=256)
def shards_heads(config: ForeignConfig) -> bool:
    """Return whether a shard has some of the heads."""
    styles = matrix_styles(config)
    causal = skeleton(config.document, config.attention)
    attention = {id(child) for m in attention_modules(causal) for child in m.children()}
    return any(
        style == COLUMN and id(causal.get_submodule(name)) in attention
        for name, style in styles.items()
    )


@lru_cache(maxsize=256)
def with_part(config: ForeignConfig, part: Part) -> ForeignConfig:
    """Return the sizes of a shard of the model."""
    causal = skeleton(config.document, config.attention)
    head = causal.get_output_embeddings().weight
    tables = {id(m.weight) for m in causal.modules() if isinstance(m, nn.Embedding)} - {id(head)}
    total, multiplied, of_blocks = 0, 0, dict.fromkeys(range(config.layers), 0)
    for name, parameter in causal.named_parameters():
        shape = local_shape(PREFIX + name, tuple(parameter.shape), config, part)
        elements = torch.Size(shape).numel()
        total += elements
        if (block := block_of(name)) is not None:
            of_blocks[block] += elements
        if parameter.ndim > 1 and id(parameter) not in tables:
            multiplied += elements
    idle = config.idle_parameters
    if EXPERTS in matrix_styles(config).values():
        idle //= part[1]
    heads = part[1] if shards_heads(config) else 1
    begin, end = even_part(config.vocab_size, *part)
    return replace(
        config,
        part=part,
        vocab_size=end - begin,
        heads=config.heads // heads,
        kv_heads=config.kv_head_count // heads,
        head_dim=config.head_size,
        parameters=total,
        block_parameters=max(of_blocks.values()),
        matmul_parameters=multiplied - idle,
        idle_parameters=idle,
    )
