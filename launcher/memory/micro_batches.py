"""One trace for all micro-batches: recorded once, with a micro-batch that shows in every size.

On a GPU what a decoder allocates grows with the tokens or does not depend on them. Recorded with a
large prime of sequences, all that grows with them is a multiple of it; so it is with the rows of
each chunk of the loss. Compiled blocks are fused by their sizes, and tiles of the MLP are as many
as the tokens ask for: those are recorded for each micro-batch. A batch of one is, too, where heads
are copied that in it lie as they are wanted: for products of matrices, and between ranks.
"""

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

_MICRO_BATCH: Final = 65_537
_MOST_BYTES: Final = 2**60
"""Of the largest tensor of a recording: sizes are 64-bit numbers."""


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
    if (micro_batch == 1 and copies) or not _grows_in_proportion(model, compute, seq_len):
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


def _grows_in_proportion(model: ModelConfig, compute: Compute, seq_len: int) -> bool:
    scores_bytes = 4 * model.heads * seq_len * seq_len  # of the widest tensor there may be
    return (
        compute.device_type == "cuda"
        and not compute.compiled
        and model.mlp_tile is None
        and _MICRO_BATCH * scores_bytes < _MOST_BYTES
    )


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
    primes = {"micro_batch": _MICRO_BATCH}
    loss_chunk = 0
    if chunked:
        ranks = 1 if share is None else share.ranks
        primes["chunk"], primes["last_chunk"] = _prime_chunks(_MICRO_BATCH * seq_len // ranks)
        loss_chunk = ranks * primes["chunk"]
    model = replace(model, loss_chunk=loss_chunk)
    record = partial(record_trace, model, compute, _MICRO_BATCH, seq_len, part, share)
    return template_of(record, partial(_product, primes=primes))


def _prime_chunks(rows: int) -> tuple[int, int]:
    """Rows of each of two chunks, a prime, and of a third one that make so many: a prime, too, but
    for a power of two."""
    return next(
        (chunk, last)
        for chunk in range(2 * rows // 5, 0, -1)
        if _is_prime(chunk) and _is_prime((last := rows - 2 * chunk) // (last & -last))
    )


def _is_prime(number: int) -> bool:
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return number > 1


def _product(number: int, primes: Mapping[str, int]) -> Size:
    names = []
    for name, prime in primes.items():
        while number and number % prime == 0:
            number //= prime
            names.append(name)
    return Size(number, tuple(names))
