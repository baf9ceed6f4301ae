"""DistributedDataParallel: every rank holds everything, gradients are averaged."""

from typing import TYPE_CHECKING, Final

from launcher.strategies.base import Strategy, Variant

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine


def build(inputs: "BuildInputs") -> "Engine":
    """Gradients live in the reduction buckets, so they are held once; mixed precision under
    autocast."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from launcher.strategies.native import native_engine

    device, module = inputs.world.device, inputs.whole_module()
    if inputs.config.loop.compiles:
        from launcher.strategies.compiled import compile_blocks

        compile_blocks(module, kept_share=inputs.resolved.kept_share)
    # They are constants, and nothing to broadcast before each forward.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [name for name, _ in module.named_buffers()]
    )
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=inputs.data_parallel.group,
        gradient_as_bucket_view=True,
    )
    # Divides each bucket before it is reduced, where DDP itself divides each gradient.
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    def set_sync(last: bool) -> None:
        # As DDP's no_sync(), which would have to be open in the forward and the backward.
        wrapped.require_backward_grad_sync = last

    return native_engine(
        inputs,
        wrapped,
        set_sync=set_sync,
        keeps_gradients=True,  # the buckets stay, so a ledger without them would be wrong
    )


DDP: Final = Strategy(
    name="ddp",
    variants=(
        Variant(
            label="ddp", also_called="ZeRO-0", fields={"strategy": "ddp"}, level=0, complexity=1
        ),
    ),
    build=build,
)
