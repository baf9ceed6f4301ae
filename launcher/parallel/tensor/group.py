"""The tensor-parallel group of a rank, and its collectives."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from launcher.parallel.mesh import Mesh, TensorRank
from launcher.parallel.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Ranks that hold shards of the same matrices, in the order of their shards."""

    share: TensorRank
    """Of this rank."""
    group: dist.ProcessGroup | None
    """None for a prediction, where shapes are all there is and nobody is told anything."""
    copies: bool = False
    """For a prediction: whether the backend sums in memory of its own, as gloo does."""
    data_group: dist.ProcessGroup | None = None
    """Ranks with the same shards of matrices, over which strategies shard."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Rows of all ranks, x [n, ...] contiguous -> [ranks * n, ...]."""
        received = x.new_empty(self.share.ranks * x.size(0), *x.shape[1:])
        if self.group is not None:
            dist.all_gather_into_tensor(received, x, group=self.group)
        return received

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over all ranks, x [ranks * n, ...] contiguous -> this rank's rows [n, ...]."""
        received = x.new_empty(x.size(0) // self.share.ranks, *x.shape[1:])
        if self.group is not None:
            dist.reduce_scatter_tensor(received, x, group=self.group)
        elif self.copies:
            x.clone()
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in x itself, contiguous."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of all ranks, in x itself, contiguous."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x


def join(mesh: Mesh, world: World) -> TensorGroup | None:
    """Start their process groups; all ranks call this. None where matrices are not cut."""
    if mesh.share is None:
        return None
    shape = (world.size // mesh.share.ranks, mesh.share.ranks)
    whole = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "tensor"))
    return TensorGroup(
        share=mesh.share, group=whole.get_group("tensor"), data_group=whole.get_group("data")
    )
