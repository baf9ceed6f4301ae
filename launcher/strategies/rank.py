"""One rank of a resolved run, as predictions see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from launcher.config.resolve import Resolved
from launcher.optim.dtypes import dtypes
from launcher.optim.entry import OptimizerCosts
from launcher.optim.registry import OPTIMIZERS
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank
from launcher.strategies.ledger import Where
from launcher.strategies.parameters import Parameter, parameters_of

FP32 = 4

_WHERE: dict[str, Where] = {"none": "device", "cpu": "host", "nvme": "disk"}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A resolved run seen by one of its ranks."""

    resolved: Resolved
    world_size: int
    """Size of its data-parallel group."""
    rank: int
    """Its place in that group."""
    device_type: str
    model_parallel: ModelParallelRank = WHOLE_MODEL
    """Its place in each dimension that shards the model."""
    memory_bytes: int | None = None
    """Memory of its device, if known: some libraries take less where there is less."""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """This rank's shards of the model's parameters."""
        return parameters_of(self.resolved.model, self.model_parallel)

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that have gradients."""
        return tuple(p for p in self.parameters if p.trained)

    def element_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of an element between steps: what is frozen needs no more than is
        computed with."""
        return self.stored_bytes if parameter.trained else self.computing_bytes(parameter)

    def computing_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of an element while it is computed with."""
        return 1 if parameter.packed else self.computed_bytes

    @cached_property
    def computed_bytes(self) -> int:
        """Bytes of an element that is computed with."""
        return dtypes(self.resolved.config.optim).computed.itemsize

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of an element of parameters, gradients and master weights between steps, where
        they are not a copy to compute with."""
        return dtypes(self.resolved.config.optim).stored.itemsize

    @property
    def params_where(self) -> Where:
        """Place of idle parameters."""
        return _WHERE[self.resolved.config.sharding.offload_param]

    @property
    def optimizer_where(self) -> Where:
        """Place of master weights and optimizer states."""
        return _WHERE[self.resolved.config.sharding.offload_optimizer]

    @property
    def pins(self) -> bool:
        """Memory offloaded to the host is page-locked."""
        return self.resolved.config.sharding.pin_memory and self.device_type == "cuda"

    @property
    def updates_in_backward(self) -> bool:
        """True if each parameter is updated as soon as its gradient is there."""
        return self.resolved.config.optim.optimizer_in_backward

    def optimizer_costs(
        self, shape: Sequence[int], name: str = "", *, where: Where | None = None
    ) -> OptimizerCosts:
        """Costs of the optimizer for one tensor, whose states are in `where`; None for the place of
        all others."""
        choice = self.resolved.config.optim
        on_device = (where or self.optimizer_where) == "device"
        updated_on = self.device_type if on_device else "cpu"
        return OPTIMIZERS[choice.optimizer].costs(name, shape, choice, updated_on)
