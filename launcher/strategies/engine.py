"""Engine protocol driven by the training loop, and one training step."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Interval
from torch import Tensor

from launcher.optim.dtensor import local_part
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.ledger import STATES, Ledger, LedgerLines

StepResult = tuple[Tensor | float, Tensor | bool]
"""Outcome of one optimizer step: the global norm of gradients before clipping, and whether they
were applied, False where the step was skipped. Tensors on the device stay there, so that reading
them costs a synchronisation only where they are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Factor of fp16 losses, so that small gradients do not vanish.

    Halved by each step that overflows, doubled after a long enough row of steps that do not.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    scale: Annotated[float, Interval(gt=0, lt=2**128)]  # fp32 ends at 2**128
    good_steps: Annotated[int, Interval(ge=0, lt=2**31)]
    """Steps since it last changed."""
    overflowed: bool = False
    """The last step did, under DeepSpeed, which does not count the first good step after it."""


class StorageCount:
    """Bytes of live storages per category and place: views, tied weights and buckets count once.

    The first category to name a storage owns it. Storages are known by their address in C++, which
    is theirs as long as they live; files by their inode, made negative.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[str, str, int]] = {}
        self.addresses: dict[int, str] = {}
        """Address on the GPU -> category."""

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
                    self.addresses.setdefault(storage.data_ptr(), category)

    def add_file(self, category: str, path: str) -> None:
        """Count the bytes that a swap file takes on its disk, nothing while it is not there."""
        assert category in STATES
        if os.path.exists(path):
            status = os.stat(path)
            # st_blocks are of 512 bytes on any file system; a sparse file has fewer than its size.
            self._entries.setdefault(-status.st_ino, (category, "disk", 512 * status.st_blocks))

    def ledger(self, device: torch.device, *, moment: str = "held") -> Ledger:
        """Return the count as the ledger of a rank that computes on `device`."""
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


class Engine(Protocol):
    """One strategy over a model and an optimizer; all that the training loop knows of it."""

    def begin_step(self, lr: float) -> None:
        """Prepare an optimizer step with learning rate `lr`; called before its first forward."""

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        """Return the mean loss of one micro-batch, [B, T] int64 each -> fp32 scalar.

        With `starts` attention stays inside documents (`GPT.forward`). `last`: this
        micro-batch closes the accumulation window. DDP, FSDP and DeepSpeed decide before the
        forward whether this micro-batch reduces gradients.
        """

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients, scaled by 1/accumulation."""

    def step(self) -> StepResult:
        """Clip, update the parameters, drop the gradients."""

    def loss_scale(self) -> LossScale | None:
        """Current fp16 loss scale, or None without loss scaling."""

    def set_loss_scale(self, value: LossScale) -> None:
        """Restore the loss scale of a checkpoint. No-op without loss scaling."""

    def evaluate(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss without gradients and without dropout, or the logits [B, T, V] where
        there are no targets; every rank must call it.

        Gathered parameters are freed again: a save may come next.
        """

    def routed(self) -> Tensor | None:
        """Return this rank's tokens [blocks, experts] since the last call; None without experts."""

    def count_states(self) -> StorageCount:
        """Return the storages of training state this rank holds right now."""

    def training_state(self) -> TrainingState:
        """Return this rank's part of a checkpoint, as ranges of flattened fp32 tensors."""


def train_step(
    engine: Engine,
    micro_batches: Sequence[tuple[Tensor, ...]],
    lr: float,
    *,
    weights: Sequence[float] = (),
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[Tensor, StepResult]:
    """One optimizer step over an accumulation window of (tokens, targets) or, with documents,
    (tokens, targets, starts), [B, T] int64 each.

    Engines average micro-batches and ranks. Where these have not all as many targets that count,
    the mean of the global batch is that of their means times `weights`
    (`GlobalBatches.weights`); none for 1 each.

    Each forward and backward and the step run in a `phase` of that name. Returns this rank's mean
    loss, an fp32 scalar on the device (over all ranks, their mean is the global batch's), and what
    the step did.
    """
    engine.begin_step(lr)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for number, inputs in enumerate(micro_batches, start=1):
        with phase("forward"):
            loss = engine.forward(*inputs, last=number == len(micro_batches))
            if weights:
                loss = loss * weights[number - 1]
        loss_sum += loss.detach()
        with phase("backward"):
            engine.backward(loss)
        del loss  # and what its graph still holds, before the next forward
    with phase("step"):
        result = engine.step()
    return loss_sum / len(micro_batches), result
