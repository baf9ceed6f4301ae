"""Allocations and traffic of DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp)."""

from collections.abc import Sequence

from launcher.forecast.buffers import Whole
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key
from launcher.forecast.traffic import Traffic, Wire
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank

# torch/csrc/distributed/c10d/reducer.cpp, and bucket_cap_mb of DistributedDataParallel.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
SENT_BYTES = 250 * 2**20
"""Its broadcast_bucket_size."""


class DdpBuffers(Whole):
    """DistributedDataParallel with gradients in its buckets, which stay.

    Sizes and order as in torch/csrc/distributed/c10d/reducer.cpp: one bucket for all, and after the
    first backward one of 1 MiB, then of 25 MiB, in the order in which gradients came.
    """

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self._arrived: list[Parameter] = []
        self._rebuilt = False

    def build(self) -> None:
        super().build()
        # The constructor sends rank 0's values to all; two copies are on their way at a time.
        copies = sent_copies([(self.rank.element_bytes(p), p.elements) for p in self.parameters])
        for number, size_bytes in enumerate(copies):
            self.timeline.free(("sent", number - 2))
            self.timeline.allocate(("sent", number), size_bytes, "temporary")
        for number in range(len(copies)):
            self.timeline.free(("sent", number))
        elements = sum(p.elements for p in self.trained)
        self.timeline.allocate("first bucket", self.stored * elements, "grads")

    def begin_forward(self, *, last: bool) -> None:
        super().begin_forward(last=last)
        # Once, before the forward that follows the first reduced backward; old and new buckets are
        # there together.
        if self._arrived and not self._rebuilt:
            self._rebuilt = True
            first, later = FIRST_BUCKET_BYTES // self.stored, BUCKET_BYTES // self.stored
            sizes = [p.elements for p in self._arrived]
            for number, bucket in enumerate(_buckets(sizes, first, later)):
                size_bytes = self.stored * sum(sizes[i] for i in bucket)
                self.timeline.allocate(("bucket", number), size_bytes, "grads")
            self.timeline.free("first bucket")

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


def _buckets(sizes: Sequence[int], first: int, later: int) -> list[range]:
    """Return places of each bucket's tensors: closed when it has `first`, further on `later`."""
    buckets, held, limit = [range(0)], 0, first
    for place, size in enumerate(sizes):
        if held >= limit:
            buckets.append(range(place, place))
            held, limit = 0, later
        buckets[-1] = range(buckets[-1].start, place + 1)
        held += size
    return buckets


def sent_copies(tensors: Sequence[tuple[int, int]], limit_bytes: int = SENT_BYTES) -> list[int]:
    """Return the bytes of each copy that `broadcast_coalesced` (c10d/comm.cpp) sends, in order.

    Each is of tensors of one type, and closed when it has `limit_bytes`; a tensor that is alone in
    its bucket is sent from where it is, without a copy.

    Args:
        tensors: (bytes of an element, elements) of each.
    """
    copies: dict[int, int] = {}  # by the place of its first tensor
    for element in {element for element, _ in tensors}:
        places = [place for place, (own, _) in enumerate(tensors) if own == element]
        sizes = [element * tensors[place][1] for place in places]
        for bucket in _buckets(sizes, limit_bytes, limit_bytes):
            whole = sum(sizes[i] for i in bucket)
            copies[places[bucket.start]] = whole if len(bucket) > 1 else 0
    return [copies[place] for place in sorted(copies)]


buffers = DdpBuffers


def traffic(wire: Wire) -> Traffic:
    """All-reduce of the gradients, in the parameters' type (fp32 under autocast), in the last
    backward, in buckets as they fill."""
    pieces = wire.stored_bytes * wire.trained_early / BUCKET_BYTES
    return Traffic(last_backward=tuple(wire.all_reduce(wire.stored_bytes, pieces=max(1.0, pieces))))
