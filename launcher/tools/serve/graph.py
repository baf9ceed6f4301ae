"""The decoder as an ONNX graph of plain operators.

Attention, rotary embedding and RMSNorm are written out, in an operator set that every parser
supports: no released TensorRT parser lists the fused operators of later sets.
Inputs and outputs are named as transformers and optimum name them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, Block, SharedInputs
from launcher.model.layers import rotation

OPSET = 18
MOST_FILE_BYTES = 2_000_000_000
"""Largest size of weights stored in the graph file itself; protobuf is limited to 2^31 bytes."""

LayerCache = tuple[Tensor, Tensor]
"""Keys and values [B, kv heads, P, head_dim]."""


class Scorer(nn.Module):
    """Logits of whole sequences.

    Positions count from the first token, so shorter sequences are padded on the right.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.decoder = CachedDecoder(model)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, T] int64 -> [B, T, V]."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        logits, _ = self.decoder(input_ids, None, positions.expand(input_ids.shape), None)
        return cast(Tensor, logits)


class CachedDecoder(nn.Module):
    """Logits of tokens that follow a KV cache, from the model's blocks one by one, as decoding in
    `launcher.model.decode` runs them."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past: Sequence[LayerCache] | None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """input_ids and position_ids [B, T], attention_mask [B, P + T], all int64, past [B, kv
        heads, P, head_dim] per block -> logits [B, T, V], and past extended by T.

        P may be 0, and is without `past`. A mask of 0 hides a position, such as left padding of a
        shorter prompt; None hides none.
        """
        model, (batch, length) = self.model, input_ids.shape
        before = 0 if past is None else past[0][0].size(2)
        hidden = hidden_keys(model.config, before, length, attention_mask, input_ids.device)
        turned = None
        if model.config.position == "rope":
            tables = rotation(model.config, position_ids.flatten())
            # [B, T, 1, rotated]: positions differ between rows of left-padded prompts
            cos, sin = (table.view(batch, length, 1, -1) for table in tables)
            turned = (cos, sin)
        sequences = SharedInputs(input_ids.shape, None, turned)
        x = model.embed(input_ids, position_ids)
        present: list[LayerCache] = []
        for number, block in enumerate(cast("list[Block]", list(model.blocks))):
            q, k, v = (part.transpose(1, 2) for part in block.attn.heads(block.ln_1(x), sequences))
            if past is not None:
                k = torch.cat([past[number][0], k], dim=2)
                v = torch.cat([past[number][1], v], dim=2)
            present.append((k, v))
            x = x + block.attn.output(_attend(q, k, v, hidden)).view_as(x)
            x = x + block.mlp(block.ln_2(x))
        # As a matrix: for more dimensions the exporter transposes the head's weight, and a tied
        # embedding would be stored twice.
        logits = model.logits(x.flatten(0, 1))
        return logits.view(batch, length, -1), present


def hidden_keys(
    config: ModelConfig, before: int, length: int, mask: Tensor | None, device: torch.device
) -> Tensor:
    """Mark the keys that each query must not see, bool [1 or B, 1, T, P + T]."""
    queries = torch.arange(length, device=device) + before
    keys = torch.arange(before + length, device=device)
    distance = queries[:, None] - keys
    seen = distance >= 0
    if config.window is not None:
        seen = seen & (distance <= config.window)
    seen = seen[None, None]
    return ~seen if mask is None else ~(seen & (mask != 0)[:, None, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Attend with q [B, H, T, head_dim] to k and v [B, kv heads, P + T, head_dim].

    Queries that share a key head are rows of one matmul, so no key is repeated. Hidden scores are
    the lowest finite number: with minus infinity, rows of padding would be NaN.
    """
    batch, kv_heads, seen, head_size = k.shape
    rows = q.reshape(batch, kv_heads, -1, head_size)
    scores = (rows @ k.transpose(-2, -1)) * (1.0 / math.sqrt(head_size))
    scores = scores.view(batch, q.size(1), -1, seen).float()
    weights = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1).to(v.dtype)
    return (weights.view(batch, kv_heads, -1, seen) @ v).view_as(q)


def past_names(config: ModelConfig, prefix: str) -> list[str]:
    """List `past_key_values.0.key`, ...: each block's keys, then its values."""
    kinds = ("key", "value")
    return [f"{prefix}.{block}.{kind}" for block in range(config.layers) for kind in kinds]


def input_names(config: ModelConfig, *, cache: bool) -> list[str]:
    """List the graph's inputs in order."""
    with_cache = ("attention_mask", "position_ids", *past_names(config, "past_key_values"))
    return ["input_ids", *(with_cache if cache else ())]


def output_names(config: ModelConfig, *, cache: bool) -> list[str]:
    """List the graph's outputs in order."""
    return ["logits", *(past_names(config, "present") if cache else ())]


def empty_past(model: GPT, batch: int, length: int = 0) -> list[LayerCache]:
    """Make a model's cache of `length` zero tokens."""
    return empty_cache(model.config, batch, length, model.dtype, model.device)


def empty_cache(
    config: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Make a cache of `length` zero tokens.

    Every tensor is distinct, because the exporter traces an aliased tensor as one input.
    """
    shape = (batch, config.kv_head_count, length, config.head_size)
    new = partial(torch.zeros, shape, dtype=dtype, device=device)
    return [(new(), new()) for _ in range(config.layers)]


def write_graph(
    model: GPT, path: Path, *, cache: bool, most_file_bytes: int = MOST_FILE_BYTES
) -> None:
    """Write `model` to `path`; weights above `most_file_bytes` go to `path` + ".data".

    A tied weight is written once.
    """
    # Any sizes but 0 and 1, which torch.export specialises on.
    batch, length, before = 2, 4, 3
    ids = torch.zeros(batch, length, dtype=torch.int64)
    arguments: tuple[Any, ...] = (ids,)
    names = {name: torch.export.Dim(name) for name in ("batch_size", "sequence_length")}
    whole = {0: names["batch_size"], 1: names["sequence_length"]}
    shapes: dict[str, Any] = {"input_ids": whole}
    if cache:
        mask = torch.ones(batch, before + length, dtype=torch.int64)
        past = empty_past(model, batch, before)
        arguments = (ids, mask, ids.clone(), past)
        total = {0: names["batch_size"], 1: torch.export.Dim("total_sequence_length")}
        held = {0: names["batch_size"], 2: torch.export.Dim("past_sequence_length")}
        shapes |= {"attention_mask": total, "position_ids": whole}
        shapes["past"] = [(held, held)] * len(past)
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            CachedDecoder(model) if cache else Scorer(model),
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=input_names(model.config, cache=cache),
            output_names=output_names(model.config, cache=cache),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph:  # drops paths of source files on this machine
        node.metadata_props.clear()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    program.save(path, external_data=size_bytes > most_file_bytes)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's remarks on unrelated packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
