"""Record the templates of every structure that the page can be asked about, for the page and for
plans (`launcher.forecast.trace.stored`).

`python -m launcher.tools.site.generate` takes minutes on all cores. Run it after a change of the
model, of tracing or of the candidates; `tests/unit/tools/test_site.py` says when. Recorded with
dimensions that are distinct primes, a size tells by its factors what it is a product of.
"""

import contextlib
import importlib
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest import mock

import torch

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.config.sharding import MODEL_PARALLEL
from launcher.forecast.candidates import choices
from launcher.forecast.predict import traced
from launcher.forecast.trace import blocks as trace
from launcher.forecast.trace.events import Compute, TraceRequest
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.stored import (
    DATA,
    ORIGIN,
    dimensions_of,
    kind_of,
    origin,
    structure_of,
)
from launcher.forecast.trace.template import (
    Dimensions,
    Size,
    Template,
    product_of,
    template_of,
)
from launcher.forecast.trace.template_json import as_json
from launcher.model import casts
from launcher.model.attention import dense
from launcher.model.config import ModelConfig
from launcher.model.products import linear_products
from launcher.model.sizes import NAMED
from launcher.strategies.shapes import shapes_of_one_block
from launcher.tools.site.runtime import zipped
from launcher.util.processes import usable_cores
from launcher.util.startup import deaf_children, interruptible

_WORLD_SIZES: Final = (1, 4)
_UNCUT: Final = {"model", *MODEL_PARALLEL}
_LORA_RANK: Final = 8
_MICRO_BATCH, SEQ_LEN, _CHUNK_ROWS = 19, 13, 97  # 247 rows are chunks of 97, 97 and 53
_PRIMES: Final = {
    "micro_batch": 19,
    "seq_len": 13,
    "window": 11,
    "d_model": 107,  # so that each weight is larger than any bias
    "kv_heads": 7,
    "heads_per_kv": 101,  # with those that are rotated, 6 x 17, and all, 103
    "head_size": 23,
    "d_ff": 133583,  # so that the weights of an MLP are the largest, as they mostly are
    "context": 149,
    "rank": 43,
}
_VOCAB: Final = 8 * 67
_PADDED_VOCAB: Final = 5003
"""A prime; padded to a multiple of 64 it is 64 x 79."""
_LARGEST_FACTOR: Final = 5
"""Largest prime of constant factors: bytes per element, number of fused matrices."""


Structure = tuple[ModelConfig, Compute, int]
"""A `prime_model`, how it computes, and the most elements of a weight that autocast casts with
others."""


class _Collected(Exception):
    """Ends a prediction where it would trace."""


def main() -> int:
    """Write the data; prints its size."""
    found = structures()
    kinds: dict[str, dict[str, Any]] = {}
    print(f"{len(found)} structures", file=sys.stderr)
    with deaf_children():
        workers = multiprocessing.get_context("fork").Pool(usable_cores())
    with workers as pool:
        templates = pool.imap(_recorded, found.values(), chunksize=4)
        for (structure, (model, *_)), template in zip(found.items(), templates, strict=True):
            of_kind = kinds.setdefault(
                kind_of(model), {"shapes": _shapes(model), "structures": {}, "templates": []}
            )
            if template not in of_kind["templates"]:
                of_kind["templates"].append(template)
            of_kind["structures"][structure] = of_kind["templates"].index(template)
    files = {f"{kind}.json": each for kind, each in kinds.items()} | {ORIGIN: origin()}
    texts = {name: json.dumps(each, separators=(",", ":")) for name, each in files.items()}
    DATA.write_bytes(zipped({name: text.encode() for name, text in texts.items()}))
    print(f"{DATA}: {DATA.stat().st_size:,} bytes", file=sys.stderr)
    return 0


def structures() -> dict[str, Structure]:
    """Return structure -> what to record for it, of all candidates of every kind of named model.

    With and without shared key heads, trained in full and with adapters.
    """
    found: dict[str, Structure] = {}
    for config in _configs():
        for run in _runs(config):
            model, compute, seq_len = _asked_of_trace(run)
            for padded in (False, True):
                low = compute.autocast or compute.params_dtype.itemsize == 2
                if padded and not low:
                    continue
                windowed = model.window is not None and model.window < seq_len - 1
                prime = prime_model(model, padded=padded, windowed=windowed)
                # what depends on the GPU, workspaces, is filled in when a trace is read
                alike = replace(compute, resident_threads=0, heads_apart=False)
                sizes = [product.weights for product in linear_products(prime)]
                for most in (max(sizes), *(size - 1 for size in sizes)):
                    key = structure_of(prime, compute, seq_len=SEQ_LEN, most_together=most)
                    found.setdefault(key, (prime, alike, most))
    return found


def _configs() -> Iterator[RunConfig]:
    seen = set()
    for name, model in NAMED.items():
        for kv_heads in (model.heads, model.heads // 2 if model.heads % 2 == 0 else 1):
            for lora_rank in (None, _LORA_RANK):
                config = RunConfig().replace(
                    model=name, kv_heads=kv_heads, layers=9, seq_len=128, lora_rank=lora_rank
                )
                kind = kind_of(config.model.build()), model.window is not None
                if kind not in seen:
                    seen.add(kind)
                    yield config
                    if model.window is not None:
                        yield config.replace(seq_len=2 * model.window)


def _runs(config: RunConfig) -> Iterator[Resolved]:
    for world_size in _WORLD_SIZES:
        planned = choices(
            config, _UNCUT, world_size=world_size, ranks_per_node=8, device_type="cuda"
        )
        yield from (choice.runs[0] for choice in planned)


def _asked_of_trace(run: Resolved) -> tuple[ModelConfig, Compute, int]:
    found: list[TraceRequest] = []

    def note(asked: TraceRequest) -> None:
        found.append(asked)
        raise _Collected

    with mock.patch.object(trace, "stored_trace", note), contextlib.suppress(_Collected):
        traced(run)
    return found[0].model, found[0].compute, found[0].seq_len


def _recorded(structure: Structure) -> dict[str, Any]:
    torch.set_num_threads(1)
    return as_json(record_template(*structure))


def _shapes(model: ModelConfig) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Return (name, dimensions) of every parameter of a `prime_model` with one block."""
    product = partial(_product, dimensions=_dimensions(model))
    return [
        (name, [(size.factor, *size.names) for size in map(product, shape)])
        for name, shape in shapes_of_one_block(model)
    ]


def prime_model(model: ModelConfig, *, padded: bool, windowed: bool) -> ModelConfig:
    """Return a shallow model of the same structure whose dimensions are coprime."""
    p, grouped = _PRIMES, model.kv_head_count < model.heads
    lora = model.lora
    return replace(
        model,
        d_model=p["d_model"],
        kv_heads=p["kv_heads"],
        heads=p["kv_heads"] * (p["heads_per_kv"] if grouped else 1),
        head_dim=8 * p["head_size"],  # as wide as fused attention wants them
        d_ff=p["d_ff"],
        context=p["context"],
        window=p["window"] if windowed else None,
        vocab_size=_PADDED_VOCAB if padded else _VOCAB,
        loss_chunk=_CHUNK_ROWS,
        lora=None if lora is None else replace(lora, rank=p["rank"]),
    )


def record_template(model: ModelConfig, compute: Compute, most_together: int) -> Template:
    """Record the template of a structure, given a `prime_model`."""
    record = partial(record_trace, TraceRequest(model, compute, _MICRO_BATCH, SEQ_LEN))
    own = (
        mock.patch.object(casts, "MOST_ELEMENTS", most_together),
        mock.patch.object(dense, "ROW_ALIGNMENT", 1),  # see `stored_template`
    )
    with own[0], own[1]:
        return template_of(record, partial(_product, dimensions=_dimensions(model)))


def _dimensions(model: ModelConfig) -> dict[str, int]:
    """Return the dimensions that have a prime factor of their own."""
    values = dimensions_of(model, micro_batch=_MICRO_BATCH, seq_len=SEQ_LEN)
    primes = {name: _largest_prime(value) for name, value in values.items()}
    found = {name: value for name, value in values.items() if primes[name] > _LARGEST_FACTOR}
    assert len({primes[name] for name in found}) == len(found), f"a prime comes twice: {primes}"
    return found


def _largest_prime(number: int) -> int:
    primes: list[int] = importlib.import_module("sympy").primefactors(number)  # torch needs it, too
    return max(primes, default=1)


def _product(number: int, dimensions: Dimensions) -> Size:
    size = product_of(number, dimensions)
    assert _largest_prime(size.factor) <= _LARGEST_FACTOR, (
        f"{number} bytes are no product of dimensions"
    )
    return replace(size, names=tuple(sorted(size.names)))


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
