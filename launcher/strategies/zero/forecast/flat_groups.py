"""Flat groups of DeepSpeed's stages 1 and 2: parameters end to end, and each rank's part."""

from collections.abc import Iterable, Iterator

from launcher.forecast.buffers import Buffers, Whole
from launcher.forecast.timeline import Timeline
from launcher.model.parts import is_projection
from launcher.strategies.ledger import Where
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank
from launcher.strategies.zero.config import zero_optimization

FP64 = 8
"""Gradient norms of ZeRO's own are summed in it."""


def optimizer_groups(rank: Rank) -> list[list[Parameter]]:
    """The parameter groups of `launcher.optim`: matrices, and vectors, of what is trained."""
    matrices = [p for p in rank.trained if len(p.shape) >= 2]
    vectors = [p for p in rank.trained if len(p.shape) < 2]
    return [group for group in (matrices, vectors) if group]


def messages(slices: Iterable[int], bucket: int) -> list[list[int]]:
    """A bucket's slices, in elements, by the message that reduces them: the slice that takes one
    beyond the bucket's size is its last, so a parameter larger than that has several."""
    found: list[list[int]] = [[]]
    filled = 0  # a large group has tens of thousands of slices
    for elements in slices:
        if filled > bucket:
            found.append([])
            filled = 0
        found[-1].append(elements)
        filled += elements
    return found


class ZeroBuffers(Buffers):
    """Common to all stages from 1 on: the optimizer goes over flat pieces, one by one, with
    gradients passing through a bucket."""

    piece_elements: list[int]
    """Elements of each piece that the optimizer updates."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self.ranks = rank.world_size
        self.where = rank.optimizer_where
        self.offloaded = self.where != "device"
        # Then norms are of gradients on their way to the host, where that is another place.
        self.norms_on_the_way = self.offloaded and rank.device_type != "cpu"
        self.config = zero_optimization(rank)
        self.bucket = int(self.config["reduce_bucket_size"])
        self.in_bucket: list[Parameter] = []
        self.filled = 0

    def where_of(self, number: int) -> Where:
        """Return where this rank's piece `number` has its master weights and optimizer states."""
        return self.where

    def build_states(self) -> None:
        for number, elements in enumerate(self.piece_elements):
            where = self.where_of(number)
            costs = self.rank.optimizer_costs((elements,), where=where)
            self.hold_states(("optimizer", number), costs, where)

    def where_updated(self, parameter: Parameter) -> Where:
        return self.where

    def update_piece(self, number: int, elements: int) -> None:
        """The optimizer on this rank's piece `number`; the first step allocates its states."""
        key, where = ("optimizer", number), self.where_of(number)
        costs = self.rank.optimizer_costs((elements,), where=where)
        self.hold_states(key, costs, where)
        self.transient(costs.temporary_bytes, where=where)
        weights = (count for p, _, count in self.updated() if is_projection(p.name))
        self.hold_masks(max(weights, default=0), where)


class FlatBuffers(ZeroBuffers, Whole):
    """Stages 1 and 2: parameters lie end to end, and each rank has a part of the master weights."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self.groups = optimizer_groups(rank)
        # Each is padded so that every rank's part begins on 4 bytes in fp16.
        self.partitions = [
            -(-sum(p.elements for p in group) // (2 * self.ranks)) * 2 for group in self.groups
        ]
        self.piece_elements = self.partitions
        self.owners: dict[str, dict[int, int]] = {}  # elements of a parameter, by rank
        self.mine: dict[str, int] = {}
        self.first: dict[str, int] = {}  # of this rank's elements in each of these
        for group, partition in zip(self.groups, self.partitions, strict=True):
            self._divide(group, partition)

    def _divide(self, group: list[Parameter], partition: int) -> None:
        """Note which ranks own a group's parameters, laid end to end, and how much of each."""
        start = 0
        for p in group:
            end = start + p.elements
            self.owners[p.name] = owners = {
                # a parameter that lies across an edge has several owners
                owner: min(end, (owner + 1) * partition) - max(start, owner * partition)
                for owner in range(start // partition, (end - 1) // partition + 1)
            }
            if self.rank.rank in owners:
                self.mine[p.name] = owners[self.rank.rank]
                self.first[p.name] = max(0, self.rank.rank * partition - start)
            start = end

    def updated(self) -> Iterator[tuple[Parameter, int, int]]:
        return ((self.by_name[name], self.first[name], count) for name, count in self.mine.items())

    def build(self) -> None:
        """Parameters as they were built; then group by group again, end to end."""
        self.materialize("built", self.element)
        for number in range(len(self.groups)):
            self.build_group(number)

    def lays_on_host(self, size_bytes: int) -> bool:
        """Return whether so many bytes are laid end to end on the host, not beside the former."""
        return False

    def _drop_built(self, number: int) -> None:
        for p in self.groups[number]:
            self.timeline.free(("built", p.name))

    def build_group(self, number: int) -> None:
        """Parameters end to end, in place of the former; master weights are cloned as the model has
        them first, where they are of another type or elsewhere."""
        timeline, element, where = self.timeline, self.element, self.where
        partition, pins = self.partitions[number], self.rank.pins
        whole_bytes = element * partition * self.ranks
        if self.lays_on_host(whole_bytes):
            self._drop_built(number)
            timeline.empty_cache()
            timeline.allocate("copies", whole_bytes, "temporary", where="host")
            timeline.allocate("end to end", whole_bytes, "temporary", where="host")
            timeline.free("copies")
        timeline.allocate(("param", number), whole_bytes, "params")
        timeline.free("end to end")
        self._drop_built(number)
        # of `.clone().to(device, dtype)`: where `to` copies nothing the clone is the master itself
        if element != self.stored or self.offloaded:
            timeline.allocate("clone", element * partition, "temporary")
        size_bytes = self.stored * partition
        timeline.allocate(("master", number), size_bytes, "master", where=where, pinned=pins)
        timeline.free("clone")
        if self.offloaded:
            # Where an updated part waits on its way to the device.
            key, size_bytes = ("staged", number), element * partition
            timeline.allocate(key, size_bytes, "temporary", where="host", pinned=pins)
