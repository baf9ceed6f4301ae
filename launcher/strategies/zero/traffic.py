"""What DeepSpeed's stages send (deepspeed 0.19.8: runtime/engine.py, runtime/zero/)."""

from launcher.strategies.traffic import Traffic, Transfer, Wire


def zero_traffic(wire: Wire) -> Traffic:
    """The transfers of one rank at the wire's stage."""
    stage = wire.sharding.zero
    assert stage is not None
    return (_stage_0, _stage_1, _stage_2, _stage_3)[stage](wire)


def _stage_0(wire: Wire) -> Traffic:
    """engine.buffered_allreduce_fallback after the last backward, in fp32."""
    every = 4 * wire.model.parameter_count
    return Traffic(last_backward=(Transfer(kind="all_reduce", size_bytes=every, hideable=False),))


def _stage_1(wire: Wire) -> Traffic:
    """All-reduce (use_multi_rank_bucket_allreduce, not a reduce-scatter) of whole gradients in
    communication_data_type, the parameters' type, once per step; then the updated parameters are
    gathered. With bf16 and fp32 accumulation BF16_Optimizer reduces after the backward."""
    late = wire.computed_bytes == 2 and wire.sharding.grad_accum_dtype == "fp32"
    reduce = (*_all_reduce(wire, hideable=not late), *wire.gradients_to_host())
    return Traffic(last_backward=reduce, step=_updated(wire))


def _stage_2(wire: Wire) -> Traffic:
    """As stage 1, but in every micro-batch: what is not this rank's part is dropped."""
    reduce = (*_all_reduce(wire, hideable=True), *wire.gradients_to_host())
    return Traffic(backward=reduce, step=_updated(wire))


def _stage_3(wire: Wire) -> Traffic:
    """Parameters gathered for each forward and backward, gradients reduce-scattered, in every
    micro-batch (stage3.py). Biases and norms stay whole, and are left out here."""
    layers, element = wire.model.layers, wire.computed_bytes
    block = wire.blocks / layers
    whole = (
        *wire.gather(wire.embeddings + block, pieces=2, host_element=element, hideable=False),
        *wire.gather(wire.blocks - block + wire.head, pieces=layers, host_element=element),
    )
    return Traffic(
        forward=whole,
        backward=(
            *whole,
            *wire.reduce_scatter(wire.blocks + wire.head, element, pieces=layers),
            *wire.reduce_scatter(wire.embeddings, element, pieces=1, hideable=False),
            *wire.gradients_to_host(),
        ),
    )


def _all_reduce(wire: Wire, *, hideable: bool) -> tuple[Transfer, ...]:
    element = wire.computed_bytes
    before, last = element * (wire.blocks + wire.head), element * wire.embeddings
    return (
        Transfer(kind="all_reduce", size_bytes=before, pieces=wire.model.layers, hideable=hideable),
        Transfer(kind="all_reduce", size_bytes=last, hideable=False),
    )


def _updated(wire: Wire) -> tuple[Transfer, ...]:
    size_bytes = wire.computed_bytes * wire.model.parameter_count
    return (
        Transfer(
            kind="all_gather", size_bytes=size_bytes, pieces=wire.model.layers, hideable=False
        ),
    )
