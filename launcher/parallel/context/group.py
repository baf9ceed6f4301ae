"""The ranks that have parts of the same sequences, and what they tell each other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from launcher.parallel.mesh import ContextRank, Mesh
from launcher.parallel.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroup:
    """Ranks of one sequence, in the order of their parts."""

    part: ContextRank
    """Of this rank."""
    group: dist.ProcessGroup | None
    """None for a prediction, where shapes are all there is and nobody is told anything."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [ranks, ...] contiguous: piece i for rank i -> [ranks, ...], piece i from rank i."""
        received = torch.empty_like(x)
        if self.group is not None:
            dist.all_to_all_single(received, x, group=self.group)
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] contiguous -> [ranks, n, ...]."""
        received = x.new_empty(self.part.ranks, *x.shape)
        if self.group is not None:
            dist.all_gather_into_tensor(received.flatten(0, 1), x, group=self.group)
        return received

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Begins to send x, contiguous, to the next rank; -> what waits for the previous one's."""
        received = torch.empty_like(x)
        if self.group is None:
            return lambda: received
        index, ranks = self.part.index, self.part.ranks
        if ranks == 1:
            return lambda: x  # a backend need not know how to send to itself
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=(index + 1) % ranks),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=(index - 1) % ranks),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            works.clear()  # they hold what was sent
            return received

        return wait


def join(mesh: Mesh, world: World) -> ContextGroup | None:
    """Start their process group; all ranks call this. None where sequences are not cut."""
    if mesh.part is None:
        return None
    names = ("data", "sequence", "tensor")
    whole = init_device_mesh(world.device.type, mesh.shape, mesh_dim_names=names)
    return ContextGroup(part=mesh.part, group=whole.get_group("sequence"))
