"""Collectives of ranks that share matrices, counted in a recording.

A compiler is shown the operators that torch puts into its graph, where it knows groups: what it
does not see to depend on what is sent, it would leave out.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher.forecast.trace.counting import WorkCounter
from launcher.forecast.trace.events import Compute
from launcher.parallel.groups import TensorGroup
from launcher.parallel.mesh import ModelParallelRank
from launcher.parallel.model_parallel import ModelParallel


def recorded_groups(rank: ModelParallelRank, compute: Compute, work: WorkCounter) -> ModelParallel:
    """Return groups without processes, which tell `work` what they would send."""
    groups = ModelParallel.predicted(rank, device_type=compute.device_type)
    if (tensor := groups.tensor) is None:
        return groups
    return replace(groups, tensor=_Counted(rank=tensor.rank, copies=tensor.copies, work=work))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted(TensorGroup):
    work: WorkCounter

    def all_gather(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _in_graph("all_gather_into_tensor", x, self.rank.size)
        return self._sent("all_gather", TensorGroup.all_gather(self, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _in_graph("reduce_scatter_tensor", x, "sum", self.rank.size)
        self._sent("reduce_scatter", x)
        return TensorGroup.reduce_scatter(self, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _in_graph("all_reduce", x, "sum")
        return self._sent("all_reduce", TensorGroup.all_reduce(self, x))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)

    def _sent(self, kind: str, whole: Tensor) -> Tensor:
        if not self.work.paused:
            self.work.here.sent[kind, whole.nbytes] += 1
        return whole


def _in_graph(kind: str, x: Tensor, *how: object) -> Tensor:
    """Return what will have been received; no group is asked while a graph is made."""
    received: Tensor = getattr(torch.ops._c10d_functional, kind)(x, *how, "")  # no group's name
    return received
