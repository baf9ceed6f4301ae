"""Inputs of a strategy's `build`, and models with their initial values."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.model.build import initial_value
from launcher.model.linears import PACKED, fp8_linears, is_adapter
from launcher.optim.dtypes import Dtypes
from launcher.optim.registry import build_optimizer
from launcher.parallel.model_parallel import DataParallelGroup, ModelParallel, ModelShards
from launcher.parallel.world import World
from launcher.strategies.parameters import shards_of
from launcher.util.errors import UserError

InitialValue = Callable[[str, torch.Size], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildInputs:
    """Inputs of a strategy's `build`.

    Factories, because FSDP shards before the optimizer exists and ZeRO-3 during construction.
    """

    resolved: Resolved
    world: World
    types: Dtypes
    """Types in which the strategy stores and computes."""
    model_parallel: ModelParallel

    @property
    def config(self) -> RunConfig:
        """The whole config."""
        return self.resolved.config

    @property
    def data_parallel(self) -> DataParallelGroup:
        """The ranks over which states can be sharded."""
        return self.model_parallel.data_parallel(self.world)

    @property
    def model_shards(self) -> ModelShards | None:
        """This rank's shards of parameters, where model-parallel ranks hold different ones."""
        if not self.model_parallel.shards_parameters:
            return None
        return ModelShards(
            model_parallel=self.model_parallel,
            data_parallel=self.data_parallel,
            of=shards_of(self.resolved.model, self.model_parallel.rank),
        )

    def new_module(self) -> nn.Module:
        """Build the decoder under the device and modes of the caller's context."""
        return self.model_parallel.decoder(self.resolved.model)

    def meta_module(self) -> nn.Module:
        """Build the decoder without memory, to be sharded or filled."""
        with torch.device("meta"):
            module = self.new_module()
        if self.config.optim.arithmetic.fp8_linears:
            module = _to_fp8(module, self.world.device)
        return module

    def whole_module(self) -> nn.Module:
        """Build the decoder on the device, with its initial values."""
        module = self.meta_module()
        materialize_whole(
            module,
            self.initial_value,
            device=self.world.device,
            dtype=self.types.parameters,
            frozen_dtype=self.types.computed,  # no update is too small for it
        )
        place_buffers(module, self.world.device)
        return module

    def initial_value(self, name: str, shape: torch.Size) -> Tensor:
        """The fp32 initial value of this rank's shard of a parameter, on the device; zeros for
        parameters that `--init-from` fills."""
        model, seed, device = self.resolved.model, self.config.loop.seed, self.world.device
        if self.config.model.init_from is not None and not is_adapter(name):
            packed = name.endswith(PACKED)
            return torch.zeros(shape, dtype=torch.uint8 if packed else None, device=device)
        shard = shards_of(model, self.model_parallel.rank)[name]
        return shard.take(initial_value(name, shard.full_shape, model, seed=seed, device=device))

    def new_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build the run's optimizer over a module's parameters."""
        return build_optimizer(module, self.config.optim)


def materialize_whole(
    module: nn.Module,
    initial_value: InitialValue,
    *,
    device: torch.device,
    dtype: torch.dtype,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Replace every meta parameter by its full initial value, in `dtype` on `device`.

    Frozen parameters are of `frozen_dtype`, where one is given. Tied parameters stay one
    parameter. Peak memory is the model plus one fp32 tensor.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in replaced:
                full_name = f"{prefix}.{name}" if prefix else name
                trained = parameter.requires_grad
                own_dtype = dtype if trained or frozen_dtype is None else frozen_dtype
                if not parameter.is_floating_point():  # quantised
                    own_dtype = parameter.dtype
                value = initial_value(full_name, parameter.shape).to(device, own_dtype)
                replaced[parameter] = nn.Parameter(value, requires_grad=trained)
            setattr(owner, name, replaced[parameter])


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a decoder's buffers, which have their values already, to where it computes."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            # Not module.to(), which would move parameters, too: sharded, swapped out or meta ones.
            owner._buffers[name] = None if buffer is None else buffer.to(device)


def fill_flat_slice(local: Tensor, value: Tensor, offset: int) -> None:
    """Copy `value`'s flat range that starts at `offset` into `local`; what lies beyond is padding.

    `local` is flat, `value` the full tensor.
    """
    flat = value.flatten()
    count = max(0, min(local.numel(), flat.numel() - offset))
    local[:count].copy_(flat[offset : offset + count])
    local[count:].zero_()


def _to_fp8(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace linear layers (on the meta device, too) by ones that round their operands to fp8.

    Weights stay as they are, under their names; each tensor is scaled by its own largest value at
    every use. The LM head keeps its dtype: fp8 logits degrade the loss. On a CPU the arithmetic is
    emulated.

    Raises:
        UserError: the GPU has no fp8 matmuls.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision fp8 needs a GPU of compute capability 8.9 or more (H100, L40S), and "
                f"{name} has {capability[0]}.{capability[1]}: use --precision bf16"
            )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = set(fp8_linears(module))
    converted: nn.Module = convert_to_float8_training(
        module,
        module_filter_fn=lambda linear, _: linear in chosen,
        config=Float8LinearConfig(emulate=device.type == "cpu"),
    )
    return converted
