"""What ranks that share sequences or matrices send each other in a micro-batch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from launcher.config.resolve import Resolved
from launcher.forecast.traffic import Collective, Transfer
from launcher.forecast.work import passes_work
from launcher.model.checkpointing import LINEARS, kept_products
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.optim.dtypes import dtypes
from launcher.strategies import strategy_of


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
        width = 2 * model.kv_head_count * model.head_size * ranks
        pieces = model.layers * (ranks - 1)
        forward = [Transfer(kind="all_gather", size_bytes=element * tokens * width, pieces=pieces)]
        gradients = Transfer(kind="all_gather", size_bytes=4 * tokens * width, pieces=pieces)
        backward = [*forward, gradients]
    else:
        sizes = [model.attention_dim, *2 * [max(model.kv_head_count, ranks) * model.head_size]]
        forward = [
            Transfer(
                kind="all_to_all",
                size_bytes=element * tokens * width,
                pieces=model.layers,
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
    """Return what the ranks of a matrix send each other in a micro-batch, by part of a step.

    Rows are gathered before the first matrices of attention and MLP, and sums scattered behind the
    second ones; backwards the other way round, and rows once more, for the weights' gradients
    (arXiv:2205.05198, section 4.2.2). The loss gathers and scatters chunk by chunk, the MLP tile by
    tile. Gradients of norms and of biases that are added to a sum are summed one by one. Nothing
    hides any of it.
    """
    config, model, ranks = resolved.config, resolved.model, resolved.config.sharding.tensor_parallel
    if ranks == 1:
        return {}
    if isinstance(model, ForeignConfig):
        return _recorded(resolved)
    rows = config.data.micro_batch * resolved.local_seq_len
    types = strategy_of(config).dtypes(config)
    # Under autocast tables are looked up in what is stored, and nothing casts what is found.
    tables = types.parameters.itemsize / types.computed.itemsize

    def moved(kind: Collective, times: float, pieces: int) -> Transfer:
        """Rows, so many times."""
        size_bytes = times * types.computed.itemsize * rows * model.d_model
        return Transfer(kind=kind, size_bytes=size_bytes, pieces=pieces, hideable=False)

    def summed(elements: float, pieces: int) -> Transfer:
        return Transfer(kind="all_reduce", size_bytes=4 * elements, pieces=pieces, hideable=False)

    tiles = -(-(rows // ranks) // model.mlp_tile) if model.mlp_tile else 0
    chunks = _loss_chunks(resolved, rows)
    twice, in_blocks = 2 * model.layers, model.layers * (1 + (tiles or 1))
    vectors = _whole_vectors(model, tiles or 1)
    forward = [
        moved("all_gather", twice + 1, in_blocks + chunks),
        moved("reduce_scatter", twice + 1 + tables, in_blocks + 1 + chunks),
        summed(3 * rows, 2 * chunks),
    ]
    backward = [
        moved("all_gather", 2 * twice + tables, 2 * in_blocks + 1),
        moved("reduce_scatter", twice, in_blocks),
        summed(sum(vectors), len(vectors)),
    ]
    backward += [
        moved(kind, blocks * times, blocks * pieces)
        for word, blocks in Counter(model.checkpointing.blocks(model.layers)).items()
        for kind, times, pieces in _repeated(model, word, tiles, rows // ranks)
    ]
    return {"forward": forward, "backward": backward}


def _recorded(resolved: Resolved) -> dict[str, list[Transfer]]:
    """Return what ranks of a matrix have been seen to send in a recording."""
    return {
        part: [
            Transfer(kind=cast(Collective, kind), **sent._asdict(), hideable=False)
            for kind, sent in work.sent.items()
        ]
        for part, work in zip(("forward", "backward"), passes_work(resolved), strict=True)
    }


def _loss_chunks(resolved: Resolved, rows: int) -> int:
    """Count the chunks of the loss; each rank has as many rows of each."""
    model, ranks = resolved.model, resolved.config.sharding.tensor_parallel
    chunk = model.loss_chunk
    if chunk is None:
        part = -(-model.vocab_size // ranks)
        chunk = automatic_chunk_rows(rows, part, model.d_model, fused=False)
    return -(-(rows // ranks) // -(-(chunk or rows) // ranks))


def _repeated(
    model: ModelConfig, word: str, tiles: int, rows: int
) -> Iterator[tuple[Collective, float, int]]:
    """List what recomputing a block sends again: kind, how often all rows, number of pieces.

    A product that is kept is kept behind its collective. Where something is recomputed, the
    block's last sum is not, unless dropout behind it has to draw its mask again. A block that is
    recomputed has its tiles in it, of all but the last whole, and each is recomputed by itself.

    Args:
        word: what the block does.
        tiles: of the MLP; 0 where it is whole.
        rows: that a rank has.
    """
    whole_block = word in ("full", "offload")
    again = () if word == "none" else [n for n in LINEARS if n not in kept_products(word)]
    if "qkv" in again:
        yield "all_gather", 1, 1
    if "proj" in again:
        yield "reduce_scatter", 1, 1
    if whole_block and model.mlp_tile and tiles > 1:
        share = (tiles - 1) * model.mlp_tile / rows
        yield "all_gather", share, tiles - 1
        yield "reduce_scatter", share, tiles - 1
    if "mlp-up" in again or tiles:
        yield "all_gather", 1, tiles or 1
    if model.dropout and (tiles or word != "none"):
        yield "reduce_scatter", 1, tiles or 1


def _whole_vectors(model: ModelConfig, tiles: int) -> list[int]:
    """Elements of the parameters that are whole on every rank, as often as they are used."""
    norm = (2 if model.norm == "layer" else 1) * [model.d_model]
    attention = [*norm, *model.attention_bias * [model.d_model]]
    attention += 2 * [model.head_size] if model.qk_norm else []
    mlp = [*norm, *model.mlp_bias * [model.d_model]]
    return [*model.layers * (attention + tiles * mlp), *norm]
