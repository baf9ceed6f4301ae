"""How the ranks that save and load together agree, apart from training's own communication."""

import datetime
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """All ranks, on a gloo group of their own: training's group is in use while a save runs.

    Collective: all ranks build one at the same time. What is exchanged are this run's own
    objects, never anything read from a file.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_main(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's value on the main rank, by rank; an empty list elsewhere."""
        if self._group is None:
            return [value]
        everybody: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, everybody, dst=0, group=self._group)
        return everybody or []

    def broadcast(self, value: object) -> Any:
        """The main rank's value; what other ranks pass is ignored."""
        message: list[Any] = [value]
        if self._group is not None:
            dist.broadcast_object_list(message, src=0, group=self._group)
        return message[0]
