"""Count bytes by walking live storages: views, tied weights and buckets count once."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.measure.records import Ledger, LedgerLines


class StorageCount:
    """Bytes per category and place; the first category to name a storage owns it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._bytes: dict[tuple[str, str], int] = {}

    def add(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of `tensors` that were not counted before."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.data_ptr() == 0 or storage.data_ptr() in self._seen:
                continue
            self._seen.add(storage.data_ptr())
            key = (category, local.device.type)
            self._bytes[key] = self._bytes.get(key, 0) + storage.nbytes()

    def ledger(self, device: torch.device) -> Ledger:
        """The count as the ledger of a rank that computes on `device`."""
        on_gpu = device.type == "cuda"
        return Ledger(
            moment="now",
            device=self._on(device.type),
            host=self._on("cpu") if on_gpu else LedgerLines(),
            disk=LedgerLines(),
        )

    def _on(self, device_type: str) -> LedgerLines:
        return LedgerLines(
            **{
                f"{name}_bytes": self._bytes.get((name, device_type), 0)
                for name in ("params", "grads", "optimizer", "buffers")
            }
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors in an optimizer's state, the step counters included."""
    states = optimizer.state.values()
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
