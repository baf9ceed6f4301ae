"""Collectives of ranks that share matrices, counted in a recording."""

from dataclasses import dataclass, replace

from torch import Tensor

from launcher.forecast.trace.counting import WorkCounter
from launcher.forecast.trace.events import Compute
from launcher.parallel.groups import TensorGroup
from launcher.parallel.mesh import ModelParallelRank
from launcher.parallel.model_parallel import ModelParallel


def recorded_groups(rank: ModelParallelRank, compute: Compute, work: WorkCounter) -> ModelParallel:
    """Return groups without processes, which tell `work` what they would send."""
    groups = ModelParallel.predicted(rank, device_type=compute.device_type)
    # What is compiled is asked for its bytes only, and counting would break its graphs.
    if (tensor := groups.tensor) is None or compute.compiled:
        return groups
    return replace(groups, tensor=_Counted(rank=tensor.rank, copies=tensor.copies, work=work))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted(TensorGroup):
    work: WorkCounter

    def all_gather(self, x: Tensor) -> Tensor:
        return self._sent("all_gather", TensorGroup.all_gather(self, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._sent("reduce_scatter", x)
        return TensorGroup.reduce_scatter(self, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._sent("all_reduce", TensorGroup.all_reduce(self, x))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._sent("all_reduce", TensorGroup.all_reduce_max(self, x))

    def _sent(self, kind: str, whole: Tensor) -> Tensor:
        if not self.work.paused:
            self.work.here.sent[kind, whole.nbytes] += 1
        return whole
