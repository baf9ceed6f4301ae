"""FSDP2: parameters, gradients and optimizer states of blocks sharded over the ranks.

Full shard = ZeRO-3 = `reshard_after_forward`; shard grad op = ZeRO-2 = without it; hybrid shards
within a group of ranks and replicates across groups.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from launcher.model.parts import parts_of
from launcher.strategies.build_inputs import BuildInputs, InitialValue, place_buffers
from launcher.strategies.compiled import compile_blocks
from launcher.strategies.engine import Engine
from launcher.strategies.fsdp.grouping import HEAD, ROOT, block_groups, reshards
from launcher.strategies.fsdp.placement import sharded_dimension
from launcher.strategies.native import native_engine


def build(inputs: BuildInputs) -> Engine:
    """Shard the meta model group by group, then give each rank only its own slices."""
    sharding, tied = inputs.config.sharding, inputs.resolved.model.tied
    if torch.__version__.startswith("2.11."):
        _shard_integers()
    root = inputs.meta_module().to(inputs.types.stored)
    for parameter in root.parameters():
        if (
            parameter.is_floating_point() and not parameter.requires_grad
        ):  # no update is too small for the type it is computed in
            parameter.data = parameter.data.to(inputs.types.computed)
    options = _options(inputs)
    reshard = sharding.reshard_after_forward
    reshards_group = partial(reshards, reshard_after_forward=reshard, tied=tied)
    if inputs.config.loop.compiles:
        compile_blocks(root, kept_share=inputs.resolved.kept_share)
    parts = parts_of(root)
    blocks = [*parts.blocks]
    sizes_bytes = [_computed_bytes(block, inputs.types.computed) for block in blocks]
    # Inner groups before the root, which takes the parameters that no group has yet.
    for layers in block_groups(sizes_bytes, inputs.world.device.type):
        together = blocks[layers.start : layers.stop]
        fully_shard(together, reshard_after_forward=reshard, **options)
    if not tied:
        head = [*parts.head.values()]
        fully_shard(head, reshard_after_forward=reshards_group(HEAD), **options)
    # The root's flag is given: left at None, FSDP2 would keep its parameters after the forward.
    fsdp = fully_shard(root, reshard_after_forward=reshards_group(ROOT), **options)
    offloaded = sharding.offload_param == "cpu"
    home = torch.device("cpu") if offloaded else inputs.world.device
    _materialize_shards(root, inputs.initial_value, device=home)
    place_buffers(root, inputs.world.device)

    def set_sync(last: bool) -> None:
        fsdp.set_requires_gradient_sync(last or sharding.reduce_each_micro_batch)

    def free_gathered() -> None:
        for module in _sharded_modules(root):
            module.reshard()

    return native_engine(
        inputs,
        root,  # the same object as `fsdp`, seen as a module
        set_sync=set_sync,
        free_gathered=free_gathered,
        hidden_gradients=partial(_whole_gradients, root),
    )


def _whole_gradients(root: nn.Module) -> Iterator[Tensor | None]:
    """Unsharded gradients of accumulation without communication, which FSDP hides."""
    states = dict.fromkeys(module._get_fsdp_state() for module in _sharded_modules(root))
    for state in states:  # modules of a group share one
        group = state._fsdp_param_group
        for parameter in group.fsdp_params if group else ():
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):  # from its first gather on
                yield parameter._unsharded_param.grad


def _shard_integers() -> None:
    """Let torch 2.11 shard the integers of quantized weights: it makes every shard a parameter that
    requires a gradient, which they cannot, and takes that back only then."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    its: Any = _fsdp_param

    def parameter(shard: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(shard, requires_grad and shard.is_floating_point())

    its.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)


def _sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def _computed_bytes(block: nn.Module, computed: torch.dtype) -> int:
    return sum(
        p.numel() * (computed if p.is_floating_point() else p.dtype).itemsize
        for p in block.parameters()
    )


def _options(inputs: BuildInputs) -> dict[str, Any]:
    sharding, world = inputs.config.sharding, inputs.world
    ranks = inputs.data_parallel.size // sharding.replicate

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dimension(parameter.shape, ranks))

    options: dict[str, Any] = {"mesh": _mesh(inputs), "shard_placement_fn": placement}
    types = inputs.types
    if types.computed != types.stored:
        # Shards keep `stored`, casts are per gather; gradients are reduced in fp32, as DDP does
        # under autocast.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=types.computed, reduce_dtype=types.stored
        )
    if sharding.offload_param == "cpu":
        # Pinning needs an accelerator; without one the policy would refuse to build.
        options["offload_policy"] = CPUOffloadPolicy(
            pin_memory=inputs.config.sharding.pin_memory and world.device.type == "cuda"
        )
    return options


def _mesh(inputs: BuildInputs) -> DeviceMesh:
    """Return the ranks that this one shards with, and replicates across."""
    device, size = inputs.world.device.type, inputs.data_parallel.size
    replicas = inputs.config.sharding.replicate
    _, model_parallel = inputs.model_parallel.shard_index
    if model_parallel == 1 and replicas == 1:
        return init_device_mesh(device, (size,))
    shape = (replicas, size // replicas, model_parallel)
    # Tensor-parallel ranks are adjacent (parallel/mesh.py), so that they are the last dimension.
    whole = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "model"))
    return whole["shard"] if replicas == 1 else whole["replicate", "shard"]


def _materialize_shards(
    module: nn.Module, initial_value: InitialValue, *, device: torch.device
) -> None:
    """Allocate the shards and copy each rank's slice of the full initial value into them.

    Initialising the shards themselves (`normal_` on a DTensor) would give every rank the same
    numbers, and other numbers than a single process has.
    """
    first_names: dict[nn.Parameter, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (first := first_names.setdefault(parameter, name)) != name:
            tied[name] = first
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in tied}
    for name, owner in owners.items():  # to_empty would make them parameters of their own
        setattr(owner, name.rpartition(".")[2], None)
    module.to_empty(device=device)
    for name, owner in owners.items():
        setattr(owner, name.rpartition(".")[2], module.get_parameter(tied[name]))
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        value = initial_value(name, parameter.shape)
        # Each rank has computed the full value: with None it takes its slice of that and sends
        # nothing, where rank 0 scatters by default.
        shard = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        with torch.no_grad():
            parameter.to_local().copy_(shard.to_local())
