"""Categories of memory, and a ledger of them per place."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from launcher.util.json_file import Record

Where = Literal["device", "host", "disk"]
"""Places of bytes: the device, host memory, and a disk (NVMe)."""
STATES: Final = ("params", "frozen", "master", "masks", "grads", "optimizer", "buffers")
"""Training state, which can live between steps."""
CATEGORIES: Final = (*STATES, "activations", "temporary")
"""Every tensor belongs to one of them; a line of the ledger is the name and `_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLines:
    """Bytes in one place (device, host or disk), each storage counted once.

    `frozen_bytes` are weights that are not trained. `master_bytes` are fp32 master weights where an
    engine keeps them beside the parameters it computes with (DeepSpeed does, in fp32 too);
    `masks_bytes` say which weights are pruned, a bit each;
    `buffers_bytes` are communication buffers that stay. Unmeasured lines are None.
    """

    params_bytes: int = 0
    frozen_bytes: int = 0
    master_bytes: int = 0
    masks_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0
    activations_bytes: int | None = None
    temporary_bytes: int | None = None
    allocator_slack_bytes: int | None = None
    context_bytes: int | None = None
    unexplained_bytes: int | None = None
    used_bytes: int | None = None

    @property
    def states_bytes(self) -> int:
        """Bytes of weights, masks, gradients, optimizer states and buffers."""
        weights = self.params_bytes + self.frozen_bytes + self.master_bytes + self.masks_bytes
        return weights + self.grads_bytes + self.optimizer_bytes + self.buffers_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger(Record):
    """Bytes of one rank at one moment, per place and category.

    `held` (between steps), `peak` (of `step`, reached in `phase`), `oom` or `predicted`.
    """

    kind: ClassVar[str] = "ledger"
    moment: str
    step: int | None = None
    phase: str | None = None
    device: LedgerLines
    host: LedgerLines
    disk: LedgerLines
