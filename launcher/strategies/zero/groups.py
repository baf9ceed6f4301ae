"""How DeepSpeed's stages 1 and 2 lay parameters end to end, and what each rank holds of them."""

from launcher.memory.timeline import Tag, Timeline, Where
from launcher.strategies.rank import FP32, Rank


class Groups:
    """The two parameter groups of `launcher.optim`, each laid end to end and cut by rank."""

    def __init__(self, rank: Rank) -> None:
        matrices = [p for p in rank.parameters if len(p.shape) >= 2]
        vectors = [p for p in rank.parameters if len(p.shape) < 2]
        self.groups = [group for group in (matrices, vectors) if group]
        self.ranks = rank.world_size
        self.partitions: list[int] = []
        self.owners: dict[str, tuple[int, int]] = {}
        self.mine: dict[str, int] = {}
        for group in self.groups:
            # Flat groups are padded so that each rank's part begins on 4 bytes in fp16.
            align = 2 * self.ranks
            partition = -(-sum(p.elements for p in group) // align) * align // self.ranks
            self.partitions.append(partition)
            start = 0
            for p in group:
                end = start + p.elements
                self.owners[p.name] = (start // partition, (end - 1) // partition)
                low, high = rank.rank * partition, (rank.rank + 1) * partition
                overlap = min(end, high) - max(start, low)
                if overlap > 0:
                    self.mine[p.name] = overlap
                start = end

    @property
    def padded(self) -> int:
        """Elements of all groups."""
        return self.ranks * sum(self.partitions)


def flatten_model(timeline: Timeline, groups: Groups, *, element: int) -> None:
    """Parameters as they were built, and again end to end; then the former go."""
    for number, group in enumerate(groups.groups):
        built = Tag("params", "parameters as built")
        timeline.allocate(("built", number), element * sum(p.elements for p in group), built)
    for number, partition in enumerate(groups.partitions):
        elements = partition * groups.ranks
        flat = Tag("params", f"flat parameters {number}", (elements,))
        timeline.allocate(("param", number), element * elements, flat)
    for number in range(len(groups.groups)):
        timeline.free(("built", number))


def allocate_master(
    timeline: Timeline,
    number: int,
    partition: int,
    *,
    element: int,
    stored: int = FP32,
    where: Where,
) -> None:
    """A rank's master weights of `stored` bytes; cloned as the model has them first."""
    master = Tag("master", f"master weights {number}", (partition,))
    if element != stored or where != "device":
        timeline.allocate("clone", element * partition, master._replace(category="temporary"))
    timeline.allocate(("master", number), stored * partition, master, where=where)
    timeline.free("clone")


def allocate_optimizer(
    timeline: Timeline, rank: Rank, number: int, partition: int, *, where: Where
) -> None:
    """The states of a rank's part of a group, born at the first step."""
    if not timeline.has(("optimizer", number)):
        states = Tag("optimizer", f"optimizer states {number}", (partition,))
        size_bytes = rank.optimizer_bytes((partition,))
        timeline.allocate(("optimizer", number), size_bytes, states, where=where)
    temporary = Tag("temporary", f"update of part {number}", (partition,))
    timeline.allocate("update", rank.update_bytes((partition,)), temporary, where=where)
    timeline.free("update")
