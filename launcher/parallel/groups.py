"""The context-parallel and the tensor-parallel group of a rank, and their collectives.

Without a process group (a prediction, where shapes are all there is) nothing is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.parallel.mesh import ContextRank, TensorRank

Exchange = Callable[[Tensor], Tensor]


def exchanged(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """Return `there(x)`, whose gradient returns by `back`: a collective and its transpose."""
    y: Tensor = _Exchanged.apply(x, there, back)
    return y


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def unchanged(x: Tensor) -> Tensor:
    """Return x as an autograd function returns what it passes on: a view."""
    return x.view_as(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroup:
    """Ranks that hold the tokens of the same sequences, in the order of their positions."""

    rank: ContextRank
    group: dist.ProcessGroup | None = None

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [ranks, ...] contiguous, x[i] for rank i -> [ranks, ...] with those from rank i."""
        received = torch.empty_like(x)
        if self.group is not None:
            dist.all_to_all_single(received, x, group=self.group)
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] contiguous -> [ranks, n, ...]."""
        received = x.new_empty(self.rank.size, *x.shape)
        if self.group is not None:
            dist.all_gather_into_tensor(received.flatten(0, 1), x, group=self.group)
        return received

    def ring_exchange(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send x, contiguous, to the next rank; -> a wait that returns the previous
        rank's."""
        received = torch.empty_like(x)
        if self.group is None:
            return lambda: received
        index, size = self.rank.index, self.rank.size
        if size == 1:
            return lambda: x  # a backend need not know how to send to itself
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=(index + 1) % size),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=(index - 1) % size),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            works.clear()  # they hold what was sent
            return received

        return wait


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Ranks that hold shards of the same matrices, in the order of their shards."""

    rank: TensorRank
    group: dist.ProcessGroup | None = None
    copies: bool = False
    """In a prediction: the backend reduces in memory of its own, as gloo does."""
    data_group: dist.ProcessGroup | None = None
    """Ranks with the same shards of matrices, over which strategies shard."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, x [n, ...] contiguous -> [ranks * n, ...]."""
        received = x.new_empty(self.rank.size * x.size(0), *x.shape[1:])
        if self.group is not None:
            dist.all_gather_into_tensor(received, x, group=self.group)
        return received

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, x [ranks * n, ...] contiguous -> this rank's rows [n, ...]."""
        received = x.new_empty(x.size(0) // self.rank.size, *x.shape[1:])
        if self.group is not None:
            dist.reduce_scatter_tensor(received, x, group=self.group)
        elif self.copies:
            x.clone()
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in x itself, contiguous."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks, in x itself, contiguous."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x
