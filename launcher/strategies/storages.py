"""Count bytes by walking live storages: views, tied weights and buckets count once."""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from launcher.optim.dtensor import local_part
from launcher.strategies.ledger import STATES, Ledger, LedgerLines


class StorageCount:
    """Bytes per category and place; the first category to name a storage owns it.

    Storages are known by their address in C++, which is theirs as long as they live; files by
    their inode, made negative.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[str, str, int]] = {}
        self._addresses: dict[int, str] = {}

    @property
    def owners(self) -> dict[int, str]:
        """Storage -> category."""
        return {key: category for key, (category, _, _) in self._entries.items()}

    def add(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of `tensors` that were not counted before."""
        assert category in STATES
        for tensor in tensors:
            if tensor is None:
                continue
            local = local_part(tensor)
            storage = local.untyped_storage()
            if storage.nbytes() > 0:
                entry = (category, local.device.type, storage.nbytes())
                self._entries.setdefault(storage._cdata, entry)
                if local.device.type == "cuda":
                    self._addresses.setdefault(storage.data_ptr(), category)

    @property
    def addresses(self) -> dict[int, str]:
        """Address on the GPU -> category."""
        return self._addresses

    def add_file(self, category: str, path: str) -> None:
        """Count the bytes that a swap file takes on its disk, nothing while it is not there."""
        assert category in STATES
        if os.path.exists(path):
            status = os.stat(path)
            self._entries.setdefault(-status.st_ino, (category, "disk", 512 * status.st_blocks))

    def ledger(self, device: torch.device, *, moment: str = "held") -> Ledger:
        """The count as the ledger of a rank that computes on `device`."""
        on_gpu = device.type == "cuda"
        return Ledger(
            moment=moment,
            device=self._on(device.type),
            host=self._on("cpu") if on_gpu else LedgerLines(),
            disk=self._on("disk"),
        )

    def _on(self, device_type: str) -> LedgerLines:
        totals = dict.fromkeys(STATES, 0)
        for category, place, size_bytes in self._entries.values():
            if place == device_type:
                totals[category] += size_bytes
        return LedgerLines(**{f"{name}_bytes": size for name, size in totals.items()})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors in an optimizer's state, the step counters included."""
    states = optimizer.state.values()
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
