"""One trace for all micro-batches: recorded once, with a micro-batch that shows in every size.

On a GPU what a decoder allocates grows with the tokens or does not depend on them. Recorded with as
many sequences as a prime above all dimensions of the model, what grows with them is a multiple of
it, and nothing else is; so it is with the rows of each chunk of the loss and of each tile of the
MLP. A micro-batch is recorded for itself where blocks are compiled and a fused kernel writes over a
tensor that happens to be as large as its result. So is a batch of one, where heads are copied that
in it lie as they are wanted: for products of matrices, and between ranks.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from launcher.forecast.trace.events import Place, Trace, TraceRequest, WorkspaceBytes
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.repeats import COMPUTED_TILES
from launcher.forecast.trace.template import (
    Size,
    Template,
    filled,
    filled_work,
    local_rows,
    loss_chunks,
    product_of,
    segment_work,
    template_of,
)
from launcher.forecast.trace.work import Work
from launcher.forecast.trace.workspaces import workspace_bytes
from launcher.model.attention import fuses_scores
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import TRL_LOSS, ForeignConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.strategies.parameters import parameter_shapes

_MOST_BYTES: Final = 2**60
"""Size of the largest tensor of a recording: sizes are 64-bit numbers."""
_LARGEST_TOGETHER: Final = 8
_FEWEST_TOKENS: Final = 32
"""Length of a sequence, so that chunks of the loss have more rows than any dimension."""


def trace_of(asked: TraceRequest) -> Trace:
    """Return `record_trace`'s result for a micro-batch, mostly from another one's recording."""
    compute = asked.compute
    taken: WorkspaceBytes = partial(workspace_bytes, compute=compute)
    copies = asked.rank.context is not None or not fuses_scores(asked.model)
    in_proportion = (
        compute.device_type == "cuda"
        and not (asked.micro_batch == 1 and copies)
        and _grows_in_proportion(asked)
    )
    if not in_proportion:
        return record_trace(asked, taken)
    dimensions, chunked = _dimensions(asked)
    # One template serves all GPUs: `filled` computes the workspaces of this one.
    recorded = _for_all_gpus(asked)
    tiles = min(_tiles(asked), COMPUTED_TILES + 1)
    template = _template(recorded, chunked=chunked, tiles=tiles)
    if compute.compiled and _has_equal_sizes(template, dimensions):
        return record_trace(asked, taken)
    return filled(template, dimensions, taken)


def _has_equal_sizes(template: Template, dimensions: Mapping[str, int]) -> bool:
    """Return whether a compiled kernel writes over a tensor that in other micro-batches is not of
    the size of what it writes."""
    sizes = [size.bytes(dimensions) if isinstance(size, Size) else None for size in template.sizes]
    return any(sizes[one] == sizes[other] for one, other in template.trace.unlike)


def work_of(asked: TraceRequest) -> dict[Place, Work]:
    """Work of each segment of a micro-batch, mostly from a recording of another one.

    What makes bytes differ from a multiple of the micro-batch is no matter here: a copy more or
    less of a single sequence.
    """
    asked = _for_all_gpus(asked)
    if not _grows_in_proportion(asked):
        return _recorded_work(asked)
    dimensions, chunked = _dimensions(asked)
    record = partial(_template, asked, chunked=chunked)
    tiles = _tiles(asked)
    if tiles < 2:
        return filled_work(record(tiles=tiles), dimensions)
    two, three = (filled_work(record(tiles=n), dimensions) for n in (2, 3))
    # Each tile but the last adds as much as the others.
    # Linear in the number of tiles: three + (tiles - 3) * (three - two).
    return {
        place: work.plus(work, times=tiles - 3).plus(two[place], times=3 - tiles)
        for place, work in three.items()
    }


@cache
def _recorded_work(asked: TraceRequest) -> dict[Place, Work]:
    trace = record_trace(asked, lambda *_: 0, passed_rows=0)
    return segment_work(trace.works, trace.chunks)


def _for_all_gpus(asked: TraceRequest) -> TraceRequest:
    """Return the request without what changes workspaces alone."""
    compute = replace(asked.compute, resident_threads=0, heads_apart=False)
    return asked._replace(compute=compute)


def _dimensions(asked: TraceRequest) -> tuple[dict[str, int], bool]:
    """Dimensions of a micro-batch, and whether its loss is computed in chunks."""
    model, compute, micro_batch, seq_len, rank = asked
    rows = micro_batch * seq_len
    on_gpu = compute.device_type == "cuda"
    chunk, last, chunks = loss_chunks(model, rows, rank.tensor, fused=on_gpu)
    chunked = model.loss_chunk != 0
    if rank.tensor is not None:
        # A sharded head copies the targets of a chunk, unless it is all of them.
        chunked = chunked and chunks > 1
    elif not on_gpu and model.loss_chunk is None:
        sizes = rows, model.vocab_size, model.d_model
        chunked = automatic_chunk_rows(*sizes, fused=False, on_host=True) > 0
    found = {"micro_batch": micro_batch, "chunk": chunk, "last_chunk": last, "chunks": chunks}
    if tiles := _tiles(asked):
        found["tile"] = tile = model.mlp_tile or 0
        found["passed_over"] = (tiles - COMPUTED_TILES) * tile
        found["last_tile"] = _local_rows(asked) - (tiles - 1) * tile
    return found, chunked


def _tiles(asked: TraceRequest) -> int:
    """Number of tiles of an MLP; 0 where it is whole."""
    tile = asked.model.mlp_tile
    return -(-_local_rows(asked) // tile) if tile else 0


def _local_rows(asked: TraceRequest) -> int:
    """Tokens that a rank's MLP computes at a time."""
    ranks = 1 if asked.rank.tensor is None else asked.rank.tensor.size
    return local_rows(asked.model, asked.micro_batch * asked.seq_len, ranks)


def _grows_in_proportion(asked: TraceRequest) -> bool:
    model, _, _, seq_len, rank = asked
    if isinstance(model, ForeignConfig) and TRL_LOSS in model.fields:
        return False  # its tiles have so many tokens, and there may be fewer
    ranks = 1 if rank.tensor is None else rank.tensor.size
    per_token = _width(model)
    if not fuses_scores(model):  # of some heads then, with all ranks' keys
        keys = seq_len if rank.context is None else rank.context.size * seq_len
        per_token = max(per_token, model.heads * keys)
    return (
        seq_len % ranks == 0  # else not of every micro-batch
        and seq_len >= _FEWEST_TOKENS * ranks
        and 4 * _micro_batch(model, seq_len) * seq_len * per_token < _MOST_BYTES  # bytes in fp32
    )


def _width(model: ModelConfig) -> int:
    """At least as many elements as a token has in any tensor but scores: of logits (a head is
    padded by less than 64 rows), of an MLP and its gate, of queries with keys and values.

    Of a decoder of transformers, whose dimensions have no names: more than several of its largest
    together."""
    if isinstance(model, ForeignConfig):
        return _LARGEST_TOGETHER * max(max(shape) for shape in parameter_shapes(model).values())
    return max(
        model.vocab_size + 64, 2 * model.ffn_dim, 3 * max(model.d_model, model.attention_dim)
    )


@cache
def _micro_batch(model: ModelConfig, seq_len: int) -> int:
    """Sequences of a recording: the first prime above every dimension, so that it divides none."""
    prime: int = _sympy().nextprime(max(_width(model), model.context, seq_len))
    return prime


def _template(asked: TraceRequest, *, chunked: bool, tiles: int) -> Template:
    """Return the template of the micro-batches that differ from this one in their size alone."""
    micro_batch = _micro_batch(asked.model, asked.seq_len)
    return _prime_template(asked._replace(micro_batch=micro_batch), chunked=chunked, tiles=tiles)


@cache
def _prime_template(asked: TraceRequest, *, chunked: bool, tiles: int) -> Template:
    """Record a trace with primes for the dimensions that a micro-batch has.

    Args:
        asked: of a prime number of sequences.
        chunked: the loss is computed in chunks.
        tiles: of each MLP, one more than are computed for any larger number; 0 where it is whole.
    """
    model, micro_batch = asked.model, asked.micro_batch
    primes, loss_chunk = {"micro_batch": micro_batch}, 0
    rows, passed_rows = _local_rows(asked), 0
    if chunked:
        primes["chunk"], primes["last_chunk"] = _prime_chunks(rows, 3, above=micro_batch)
        # The config counts rows of all ranks, of which each rank has `rows`.
        loss_chunk = micro_batch * asked.seq_len // rows * primes["chunk"]
    if tiles == 1:
        model = replace(model, mlp_tile=rows)
    elif tiles:
        if tiles > COMPUTED_TILES:
            # Of another size than a tile, so that one prime stands for each.
            tiles, passed_rows = COMPUTED_TILES, _sympy().nextprime(rows // 5)
            primes["passed_over"] = passed_rows
        primes["tile"], primes["last_tile"] = _prime_chunks(
            rows - passed_rows, tiles, above=micro_batch, unlike=primes.get("chunk")
        )
        model = replace(model, mlp_tile=primes["tile"])
    asked = asked._replace(model=replace(model, loss_chunk=loss_chunk))
    record = partial(record_trace, asked, passed_rows=passed_rows)
    return template_of(record, partial(product_of, dimensions=primes))


def _prime_chunks(
    rows: int, count: int, *, above: int, unlike: int | None = None
) -> tuple[int, int]:
    """Rows of each of `count` chunks but the last, a prime, and of the last one, which make so
    many: a prime, too, but for a power of two."""
    is_prime = _sympy().isprime
    # from a last chunk of half a chunk on: (count - 1/2) * chunk = rows
    for chunk in range(2 * rows // (2 * count - 1), above, -1):
        last = rows - (count - 1) * chunk
        odd = last // (last & -last)  # without its power of two
        if chunk != unlike and odd > above and is_prime(chunk) and is_prime(odd):
            return chunk, last
    raise AssertionError(f"{rows} rows have no chunks above {above}")


def _sympy() -> Any:
    """Import sympy, which fake tensors load in any case."""
    return importlib.import_module("sympy")
