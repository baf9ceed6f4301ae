"""One trace for all micro-batches: recorded once, with a micro-batch that shows in every size.

On a GPU what a decoder allocates grows with the tokens or does not depend on them. Recorded with as
many sequences as a prime above all dimensions of the model, what grows with them is a multiple of
it, and nothing else is; so it is with the rows of each chunk of the loss. Tiles of the MLP are as
many as the tokens ask for: those are recorded for each micro-batch. Compiled blocks are, too, where
storages happen to be of one size in it: a fused kernel writes over one of its size. A batch of one
is, where heads are copied that in it lie as they are wanted: for products of matrices, and between
ranks.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Final

from launcher.forecast.trace.events import Compute, PartialBytes, Place, Trace
from launcher.forecast.trace.kernels import partial_sums_bytes
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.template import (
    Size,
    Template,
    filled,
    filled_work,
    loss_chunks,
    segment_work,
    template_of,
)
from launcher.forecast.trace.work import Work
from launcher.model.attention import fuses_scores
from launcher.model.config import ModelConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.parallel.mesh import ModelParallelRank

_MOST_BYTES: Final = 2**60
"""Of the largest tensor of a recording: sizes are 64-bit numbers."""
_FEWEST_TOKENS: Final = 32
"""Of a sequence, so that chunks of the loss have more rows than any dimension."""


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> Trace:
    """What `record_trace` records for a micro-batch, mostly from what it has for another one."""
    threads = compute.resident_threads
    sums: PartialBytes = partial(partial_sums_bytes, resident_threads=threads)
    copies = rank.context is not None or not fuses_scores(model)
    in_proportion = (
        compute.device_type == "cuda"
        and model.mlp_tile is None
        and not (micro_batch == 1 and copies)
        and _grows_in_proportion(model, seq_len, rank)
    )
    if not in_proportion:
        return record_trace(model, compute, micro_batch, seq_len, rank, sums)
    dimensions, chunked = _dimensions(model, compute, micro_batch, seq_len, rank)
    template = _template(
        model, replace(compute, resident_threads=0), seq_len, rank, chunked=chunked
    )
    if compute.compiled and _has_equal_sizes(template, dimensions):
        return record_trace(model, compute, micro_batch, seq_len, rank, sums)
    return filled(template, dimensions, sums)


def _has_equal_sizes(template: Template, dimensions: Mapping[str, int]) -> bool:
    """Return whether storages of blocks are of one size that are not in other micro-batches."""
    sizes = {
        template.sizes[lifetime.size_bytes]
        for lifetime in template.trace.lifetimes
        if lifetime.allocation[0].part in ("block", "block_backward")
    }
    products = [size for size in sizes if isinstance(size, Size)]
    return len({size.bytes(dimensions) for size in products}) < len(products)


def work_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> dict[Place, Work]:
    """Work of each segment of a micro-batch, mostly from a recording of another one.

    What compiling fuses of it is no matter here, and neither is what else makes bytes differ from
    a multiple of the micro-batch: a copy more or less of a single sequence.
    """
    casts_compiled = compute.fp8 and compute.compiled
    compute = replace(compute, resident_threads=0, compiled=False, casts_compiled=casts_compiled)
    if not _grows_in_proportion(model, seq_len, rank):
        return _recorded_work(model, compute, micro_batch, seq_len, rank)
    dimensions, chunked = _dimensions(model, compute, micro_batch, seq_len, rank)
    record = partial(_template, model, compute, seq_len, rank, chunked=chunked)
    if model.mlp_tile is None:
        return filled_work(record(), dimensions)
    tiles, last = divmod(
        micro_batch * seq_len // (1 if rank.tensor is None else rank.tensor.size) - 1,
        model.mlp_tile,
    )
    tile_dimensions = {"tile": model.mlp_tile, "last_tile": last + 1}
    two, three = (filled_work(record(tiles=n), {**dimensions, **tile_dimensions}) for n in (2, 3))
    # Each tile but the last adds as much as the others.
    return {
        place: work.plus(work, times=tiles - 2).plus(two[place], times=2 - tiles)
        for place, work in three.items()
    }


@cache
def _recorded_work(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> dict[Place, Work]:
    trace = record_trace(model, compute, micro_batch, seq_len, rank, lambda *_: 0)
    return segment_work(trace.works, trace.chunks)


def _dimensions(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> tuple[dict[str, int], bool]:
    """Dimensions of a micro-batch, and whether its loss is computed in chunks."""
    rows = micro_batch * seq_len
    on_gpu = compute.device_type == "cuda"
    chunk, last, chunks = loss_chunks(model, rows, rank.tensor, fused=on_gpu)
    chunked = model.loss_chunk != 0
    if rank.tensor is not None:
        # A sharded head copies the targets of a chunk, unless it is all of them.
        chunked = chunked and chunks > 1
    elif not on_gpu and model.loss_chunk is None:
        chunked = automatic_chunk_rows(rows, model.vocab_size, model.d_model, fused=False) > 0
    found = {"micro_batch": micro_batch, "chunk": chunk, "last_chunk": last, "chunks": chunks}
    return found, chunked


def _grows_in_proportion(model: ModelConfig, seq_len: int, rank: ModelParallelRank) -> bool:
    ranks = 1 if rank.tensor is None else rank.tensor.size
    per_token = _width(model)
    if not fuses_scores(model):  # of some heads then, with all ranks' keys
        keys = seq_len if rank.context is None else rank.context.size * seq_len
        per_token = max(per_token, model.heads * keys)
    return (
        seq_len % ranks == 0  # else not of every micro-batch
        and seq_len >= _FEWEST_TOKENS * ranks
        and 4 * _micro_batch(model, seq_len) * seq_len * per_token < _MOST_BYTES
    )


def _width(model: ModelConfig) -> int:
    """At least as many elements as a token has in any tensor but scores: of logits (a head is
    padded by less than 64 rows), of an MLP and its gate, of queries with keys and values."""
    return max(
        model.vocab_size + 64, 2 * model.ffn_dim, 3 * max(model.d_model, model.attention_dim)
    )


@cache
def _micro_batch(model: ModelConfig, seq_len: int) -> int:
    """Sequences of a recording: the first prime above every dimension, so that it divides none."""
    above = max(_width(model), model.context, seq_len)
    return next(number for number in itertools.count(above + 1) if _is_prime(number))


@cache
def _template(
    model: ModelConfig,
    compute: Compute,
    seq_len: int,
    rank: ModelParallelRank,
    *,
    chunked: bool,
    tiles: int = 0,
) -> Template:
    """Record a trace with primes for the dimensions that a micro-batch has.

    Args:
        chunked: the loss is computed in chunks.
        tiles: of each MLP; 0 where it is whole.
    """
    micro_batch = _micro_batch(model, seq_len)
    primes, loss_chunk = {"micro_batch": micro_batch}, 0
    ranks = 1 if rank.tensor is None else rank.tensor.size
    rows = micro_batch * seq_len // ranks
    if chunked:
        primes["chunk"], primes["last_chunk"] = _prime_chunks(rows, 3, above=micro_batch)
        loss_chunk = ranks * primes["chunk"]
    if tiles:
        primes["tile"], primes["last_tile"] = _prime_chunks(
            rows, tiles, above=micro_batch, unlike=primes.get("chunk")
        )
        model = replace(model, mlp_tile=primes["tile"])
    model = replace(model, loss_chunk=loss_chunk)
    record = partial(record_trace, model, compute, micro_batch, seq_len, rank)
    return template_of(record, partial(_product, primes=primes))


def _prime_chunks(
    rows: int, count: int, *, above: int, unlike: int | None = None
) -> tuple[int, int]:
    """Rows of each of `count` chunks but the last, a prime, and of the last one, which make so
    many: a prime, too, but for a power of two."""
    for chunk in range(2 * rows // (2 * count - 1), above, -1):
        last = rows - (count - 1) * chunk
        odd = last // (last & -last)
        if chunk != unlike and odd > above and _is_prime(chunk) and _is_prime(odd):
            return chunk, last
    raise AssertionError(f"{rows} rows have no chunks above {above}")


def _is_prime(number: int) -> bool:
    if number % 2 == 0:
        return number == 2
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


def _product(number: int, primes: Mapping[str, int]) -> Size:
    names = []
    for name, prime in primes.items():
        while number and number % prime == 0:
            number //= prime
            names.append(name)
    return Size(number, tuple(names))
