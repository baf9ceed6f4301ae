"""Bytes that ranks of tensor and context parallelism send each other in a micro-batch."""

from dataclasses import replace
from functools import partial
from typing import cast

from launcher.config.resolve import Resolved
from launcher.forecast.traffic import Collective, Transfer
from launcher.forecast.work import passes_work
from launcher.optim.dtypes import dtypes


def sequence_transfers(resolved: Resolved) -> dict[str, list[Transfer]]:
    """Return what ranks of a sequence send each other in a micro-batch, by part of a step.

    Ulysses exchanges q, k, v and what attention finds, with nothing to hide it behind; a ring
    passes keys and values on to all others while it computes, and in the backward their gradients
    in fp32, too. What is recomputed is sent again.
    """
    config, model = resolved.config, resolved.own_model
    ranks = config.sharding.context_parallel
    if ranks == 1:
        return {}
    tokens = config.data.micro_batch * resolved.local_seq_len * model.layers
    element = dtypes(config.optim).computed.itemsize
    if config.sharding.context_parallel_method == "ring":
        # keys and values of all ranks, since a gather is priced by its whole tensor
        width = 2 * model.kv_head_count * model.head_size * ranks
        pieces = model.layers * (ranks - 1)
        gather = partial(Transfer, kind="all_gather", pieces=pieces, among="sequence")
        forward = [gather(size_bytes=element * tokens * width)]
        backward = [*forward, gather(size_bytes=4 * tokens * width)]  # gradients
    else:
        # key heads fewer than ranks are repeated, so that each rank has one
        sizes = [model.attention_dim, *2 * [max(model.kv_head_count, ranks) * model.head_size]]
        forward = [
            Transfer(
                kind="all_to_all",
                size_bytes=element * tokens * width,
                pieces=model.layers,
                among="sequence",
                hideable=False,
            )
            for width in (*sizes, model.attention_dim)
        ]
        backward = list(forward)
    words = model.checkpointing.blocks(model.layers)
    again = model.layers - words.count("none")
    if again:
        share = again / model.layers
        backward += [
            replace(t, size_bytes=share * t.size_bytes, pieces=round(share * t.pieces))
            for t in forward
        ]
    return {"forward": forward, "backward": backward}


def tensor_transfers(resolved: Resolved) -> dict[str, list[Transfer]]:
    """Return what the ranks of a matrix send each other in a micro-batch, by part of a step, as a
    recording has seen it. Nothing hides any of it."""
    if resolved.config.sharding.tensor_parallel == 1:
        return {}
    return {
        part: [
            Transfer(
                kind=cast(Collective, kind),
                size_bytes=times * size,
                pieces=times,
                among="tensor",
                hideable=False,
            )
            for (kind, size), times in work.sent.items()
        ]
        for part, work in zip(("forward", "backward"), passes_work(resolved), strict=True)
    }
