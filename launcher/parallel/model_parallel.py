"""Model parallelism: ranks that compute one copy of the model together, in any dimension.

The one place that knows all dimensions; strategies, checkpoints and the trace name none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from launcher.config.model import part_of
from launcher.model.build import new_decoder
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.gpt import GPT
from launcher.parallel.groups import ContextGroup, TensorGroup
from launcher.parallel.mesh import Mesh, ModelParallelRank
from launcher.parallel.tensor.shards import ParameterShard
from launcher.parallel.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelGroup:
    """Ranks that hold the same shards of the model, over which a strategy can shard states."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None for all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallel:
    """Groups of ranks that compute one copy of the model, per dimension; None for a size of 1."""

    context: ContextGroup | None = None
    tensor: TensorGroup | None = None

    @classmethod
    def join(cls, mesh: Mesh, world: World) -> ModelParallel:
        """Start the process groups of a run; all ranks call this."""
        device, context, tensor = world.device.type, None, None
        if mesh.model.context is not None:
            names = ("data", "context", "tensor")
            whole = init_device_mesh(device, mesh.shape, mesh_dim_names=names)
            context = ContextGroup(rank=mesh.model.context, group=whole.get_group("context"))
        if (rank := mesh.model.tensor) is not None:
            # Context-parallel ranks hold the same shards, so that here they are data-parallel ones.
            shape = (world.size // rank.size, rank.size)
            whole = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))
            tensor = TensorGroup(
                rank=rank, group=whole.get_group("tensor"), data_group=whole.get_group("data")
            )
        return cls(context=context, tensor=tensor)

    @classmethod
    def predicted(cls, rank: ModelParallelRank, *, device_type: str) -> ModelParallel:
        """Groups without processes, which send nothing."""
        copies = device_type == "cpu"
        return cls(
            context=None if rank.context is None else ContextGroup(rank=rank.context),
            tensor=None if rank.tensor is None else TensorGroup(rank=rank.tensor, copies=copies),
        )

    @property
    def rank(self) -> ModelParallelRank:
        """This rank's place in each dimension."""
        return ModelParallelRank(
            context=None if self.context is None else self.context.rank,
            tensor=None if self.tensor is None else self.tensor.rank,
        )

    @property
    def shards_parameters(self) -> bool:
        """Each rank holds shards of parameters; context-parallel ranks hold the same ones."""
        return self.tensor is not None

    @property
    def shard_index(self) -> tuple[int, int]:
        """(index, number) of this rank among those that hold different shards of parameters."""
        return (0, 1) if self.tensor is None else (self.tensor.rank.index, self.tensor.rank.size)

    def decoder(self, config: ModelConfig) -> nn.Module:
        """Build this rank's decoder under the device and modes of the caller's context."""
        if self.tensor is None and self.context is None:
            return new_decoder(config)
        if isinstance(config, ForeignConfig):
            if self.tensor is not None:
                from launcher.parallel.tensor.foreign import LocalMatrixDecoder

                assert self.context is None
                return LocalMatrixDecoder(config, self.tensor)
            from launcher.parallel.context.foreign import LocalSequenceDecoder

            assert self.context is not None
            return LocalSequenceDecoder(config, self.context)
        own = config
        if self.tensor is not None:
            own = part_of(config, self.tensor.rank.size, self.tensor.rank.index)
        if self.context is None:
            model = GPT(own)
        else:
            from launcher.parallel.context.local import LocalSequenceGPT

            model = LocalSequenceGPT(own, self.context)
        if self.tensor is not None:
            from launcher.parallel.tensor.decoder import shard_modules

            shard_modules(model, config, self.tensor)
        return model

    def data_parallel(self, world: World) -> DataParallelGroup:
        """The data-parallel group of a rank; context-parallel ranks count as further members."""
        if self.tensor is None:
            return DataParallelGroup(rank=world.rank, size=world.size)
        size = self.tensor.rank.size
        return DataParallelGroup(
            rank=world.rank // size, size=world.size // size, group=self.tensor.data_group
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x, in place, over the ranks that hold different shards of parameters."""
        return x if self.tensor is None else self.tensor.all_reduce(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest x, in place, of the ranks that hold different shards of parameters."""
        return x if self.tensor is None else self.tensor.all_reduce_max(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShards:
    """A rank's shards of all parameters, where model-parallel ranks hold different ones."""

    model_parallel: ModelParallel
    data_parallel: DataParallelGroup
    """Ranks that hold the same shards, or further shards of them."""
    of: Mapping[str, ParameterShard]
    """Name of a parameter -> its shard."""
