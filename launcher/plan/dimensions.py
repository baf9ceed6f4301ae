"""What ranks that share sequences or matrices send each other in a micro-batch."""

from launcher.config.resolve import Resolved
from launcher.model.config import ModelConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.optim.dtypes import dtypes
from launcher.strategies.traffic import Collective, Transfer


def sequence_transfers(resolved: Resolved) -> dict[str, list[Transfer]]:
    """What the ranks of a sequence send each other in a micro-batch, by part of a step.

    Ulysses exchanges q, k, v and what attention finds, with nothing to hide it behind; a ring
    passes keys and values on to all others while it computes, and in the backward their gradients
    in fp32, too. What is recomputed is sent again.
    """
    config, model = resolved.config, resolved.own_model
    ranks = config.sharding.sequence_parallel
    if ranks == 1:
        return {}
    tokens = config.data.micro_batch * resolved.local_seq_len * model.layers
    element = dtypes(config.optim).computed.itemsize
    if config.sharding.sequence_method == "ring":
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
    if model.activation_checkpointing != "none":
        backward += forward
    return {"forward": forward, "backward": backward}


def tensor_transfers(resolved: Resolved) -> dict[str, list[Transfer]]:
    """What the ranks of a matrix send each other in a micro-batch, by part of a step.

    Rows are gathered before the first matrices of attention and MLP, and sums scattered behind the
    second ones; backwards the other way round, and rows once more, for the weights' gradients
    (arXiv:2205.05198, section 4.2.2). Full checkpointing repeats all but a block's last. The loss
    gathers and scatters chunk by chunk. Gradients of norms and of biases that are added to a sum
    are summed one by one. Nothing hides any of it.
    """
    config, model, ranks = resolved.config, resolved.model, resolved.config.sharding.tensor_parallel
    if ranks == 1:
        return {}
    rows = config.data.micro_batch * resolved.local_seq_len
    element = dtypes(config.optim).computed.itemsize
    chunk = model.loss_chunk
    if chunk is None:
        chunk = automatic_chunk_rows(rows, -(-model.vocab_size // ranks), model.d_model)
    chunks = -(-rows // (chunk or rows))

    def moved(kind: Collective, times: int, pieces: int) -> Transfer:
        """Rows, so many times."""
        size_bytes = times * element * rows * model.d_model
        return Transfer(kind=kind, size_bytes=size_bytes, pieces=pieces, hideable=False)

    def summed(elements: float, pieces: int) -> Transfer:
        return Transfer(kind="all_reduce", size_bytes=4 * elements, pieces=pieces, hideable=False)

    layers, vectors = model.layers, _whole_vectors(model)
    in_blocks = 2 * layers
    forward = [
        moved("all_gather", in_blocks + 1, in_blocks + chunks),
        moved("reduce_scatter", in_blocks + 2, in_blocks + 1 + chunks),
        summed(3 * rows, 2 * chunks),
    ]
    backward = [
        moved("all_gather", 2 * in_blocks + 1, 2 * in_blocks + 1),
        moved("reduce_scatter", in_blocks, in_blocks),
        summed(layers * sum(vectors), layers * len(vectors)),
    ]
    if model.activation_checkpointing in ("full", "offload"):
        backward += [
            moved("all_gather", in_blocks, in_blocks),
            moved("reduce_scatter", layers, layers),
        ]
    return {"forward": forward, "backward": backward}


def _whole_vectors(model: ModelConfig) -> list[int]:
    """Elements of a block's parameters that are whole on every rank."""
    norm = (2 if model.norm == "layer" else 1) * [model.d_model]
    biases = [model.d_model] * (model.attention_bias + model.mlp_bias)
    return [*norm, *norm, *biases, *(2 * [model.head_size] if model.qk_norm else [])]
