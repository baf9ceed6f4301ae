"""Allocations and traffic of DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp)."""

from collections import defaultdict
from collections.abc import Sequence

from launcher.forecast.buffers import Buffers, Whole
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key
from launcher.forecast.traffic import Traffic, Wire
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank

# torch/csrc/distributed/c10d/reducer.cpp, and bucket_cap_mb of DistributedDataParallel.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


class DdpBuffers(Whole):
    """DistributedDataParallel with gradients in its buckets, which stay.

    Sizes and order as in torch/csrc/distributed/c10d/reducer.cpp: a first bucket of 1 MiB, then
    25 MiB, filled in the order of the parameters, and once more, after the first backward, in the
    order in which gradients came.
    """

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self._arrived: list[Parameter] = []
        self._buckets: list[tuple[str, int]] = []
        self._rebuilt = False

    def build(self) -> None:
        super().build()
        # The constructor sends rank 0's values to all, flattened by type in pieces of 250 MB, of
        # which two are on their way.
        whole: defaultdict[int, int] = defaultdict(int)
        for p in self.parameters:
            element = self.rank.element_bytes(p)
            whole[element] += element * p.elements
        self.transient(sum(min(size_bytes, 250 * 10**6) for size_bytes in whole.values()))
        self._allocate(self.trained, "first")

    def begin_forward(self, *, last: bool) -> None:
        super().begin_forward(last=last)
        if self._arrived and not self._rebuilt:
            self._rebuilt = True
            before = self._buckets
            self._allocate(self._arrived, "rebuilt")
            for key in before:
                self.timeline.free(key)

    def gradient(self, key: Key, name: str) -> None:
        if self._rebuilt:  # it is in its bucket
            self.timeline.free(key)
            return
        self.accumulate(key, name)
        if self.last:
            self._arrived.append(self.by_name[name])
            self.timeline.free(("grad", name))  # copied into its bucket

    def drop_gradients(self) -> None:
        pass  # zeroed in place

    def _allocate(self, order: Sequence[Parameter], name: str) -> None:
        first, later = FIRST_BUCKET_BYTES // self.stored, BUCKET_BYTES // self.stored
        sizes = _bucket_elements(order, first, later)
        self._buckets = [(name, number) for number in range(len(sizes))]
        for key, elements in zip(self._buckets, sizes, strict=True):
            self.timeline.allocate(key, self.stored * elements, "grads")


def _bucket_elements(order: Sequence[Parameter], first: int, later: int) -> list[int]:
    """Elements of each bucket, which is closed when it has `first` or, further on, `later`."""
    buckets, limit = [0], first
    for parameter in order:
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = later
        buckets[-1] += parameter.elements
    return buckets


def buffers(rank: Rank, timeline: Timeline) -> Buffers:
    """Gradients live in buckets that stay."""
    return DdpBuffers(rank, timeline)


def traffic(wire: Wire) -> Traffic:
    """All-reduce of the gradients, in the parameters' type (fp32 under autocast), in the last
    backward, in buckets as they fill."""
    pieces = wire.stored_bytes * wire.trained.before_embeddings / BUCKET_BYTES
    return Traffic(last_backward=tuple(wire.all_reduce(wire.stored_bytes, pieces=max(1.0, pieces))))
