"""One trace for all micro-batches: recorded once, with a micro-batch that shows in every size.

On a GPU what a decoder allocates grows with the tokens or does not depend on them. Recorded with as
many sequences as a prime above all dimensions of the model, what grows with them is a multiple of
it, and nothing else is; so it is with the rows of each chunk of the loss. Compiled blocks are fused
by their sizes, and tiles of the MLP are as many as the tokens ask for: those are recorded for each
micro-batch. A batch of one is, too, where heads are copied that in it lie as they are wanted: for
products of matrices, and between ranks.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Final

from launcher.memory.gpu_kernels import partial_sums_bytes
from launcher.memory.template import Size, Template, filled, loss_chunks, template_of
from launcher.memory.trace_events import Compute, PartialBytes, Trace
from launcher.memory.trace_record import record_trace
from launcher.model.attention import fuses_scores
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import Share, Slice

_MOST_BYTES: Final = 2**60
"""Of the largest tensor of a recording: sizes are 64-bit numbers."""
_FEWEST_TOKENS: Final = 32
"""Of a sequence, so that chunks of the loss have more rows than any dimension."""


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    part: Slice | None,
    share: Share | None,
) -> Trace:
    """What `record_trace` records for a micro-batch, mostly from what it has for another one."""
    threads = compute.resident_threads
    sums: PartialBytes = partial(partial_sums_bytes, resident_threads=threads)
    copies = part is not None or not fuses_scores(model)
    in_proportion = _grows_in_proportion(model, compute, seq_len, share)
    if not in_proportion or (micro_batch == 1 and copies):
        return record_trace(model, compute, micro_batch, seq_len, part, share, sums)
    chunk, last, chunks = loss_chunks(model, micro_batch * seq_len, share)
    template = _template(
        model,
        replace(compute, resident_threads=0),
        seq_len,
        part,
        share,
        # A cut head copies the targets of a chunk, unless it is all of them.
        chunked=model.loss_chunk != 0 and (share is None or chunks > 1),
    )
    dimensions = {"micro_batch": micro_batch, "chunk": chunk, "last_chunk": last, "chunks": chunks}
    return filled(template, dimensions, sums)


def _grows_in_proportion(
    model: ModelConfig, compute: Compute, seq_len: int, share: Share | None
) -> bool:
    ranks = 1 if share is None else share.ranks
    return (
        compute.device_type == "cuda"
        and not compute.compiled
        and model.mlp_tile is None
        and seq_len % ranks == 0  # else not of every micro-batch
        and seq_len >= _FEWEST_TOKENS * ranks
        and 4 * _prime_above(_widest(model, seq_len)) * seq_len * _per_token(model, seq_len)
        < _MOST_BYTES
    )


def _per_token(model: ModelConfig, seq_len: int) -> int:
    """Most elements of one tensor that a token has: logits, an MLP's, queries with keys and values,
    or scores."""
    width = max(model.d_model, model.attention_dim)
    most = max(model.vocab_size + 64, 2 * model.ffn_dim, 3 * width)
    return most if fuses_scores(model) else max(most, model.heads * seq_len)


def _widest(model: ModelConfig, seq_len: int) -> int:
    """Above every dimension, and what it is made of; a head's padding is less than 64 rows."""
    return max(model.vocab_size + 64, model.ffn_dim, model.d_model, model.context, seq_len)


@cache
def _template(
    model: ModelConfig,
    compute: Compute,
    seq_len: int,
    part: Slice | None,
    share: Share | None,
    *,
    chunked: bool,
) -> Template:
    widest = _widest(model, seq_len)
    micro_batch = _prime_above(widest)
    primes, loss_chunk = {"micro_batch": micro_batch}, 0
    if chunked:
        ranks = 1 if share is None else share.ranks
        rows = micro_batch * seq_len // ranks
        primes["chunk"], primes["last_chunk"] = _prime_chunks(rows, above=widest)
        loss_chunk = ranks * primes["chunk"]
    model = replace(model, loss_chunk=loss_chunk)
    record = partial(record_trace, model, compute, micro_batch, seq_len, part, share)
    return template_of(record, partial(_product, primes=primes))


def _prime_chunks(rows: int, *, above: int) -> tuple[int, int]:
    """Rows of each of two chunks, a prime, and of a third one that make so many: a prime, too, but
    for a power of two."""
    for chunk in range(2 * rows // 5, above, -1):
        last = rows - 2 * chunk
        odd = last // (last & -last)
        if odd > above and _is_prime(chunk) and _is_prime(odd):
            return chunk, last
    raise AssertionError(f"{rows} rows have no chunks above {above}")


@cache
def _prime_above(number: int) -> int:
    """The first prime from `number` on."""
    return next(n for n in itertools.count(number) if _is_prime(n))


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
