"""Note what a process holds of GPUs that others train on: the process that starts the ranks, or a
rank that has loaded something to the GPU of another."""

from __future__ import annotations

import json
import os
from typing import Any


def note_rank(recorder: Any, device: int) -> None:
    """Note which GPU a rank trains on, and what it has held of others."""
    recorder.event("own_gpu", uuid=_name(recorder.torch, device), parent=os.getppid())
    for gpu, (allocated, reserved) in recorder.peaks.others(device):
        recorder.event(
            "other_gpu",
            gpu=gpu,
            uuid=_name(recorder.torch, gpu),
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
        )


def note_process(recorder: Any) -> None:
    """Write what this process, which is no rank, has held of each GPU, if it has used any."""
    torch, peaks = recorder.torch, recorder.peaks
    if peaks is None or not torch.cuda.is_initialized():
        return
    recorder.closed = True
    own = torch.cuda.current_device()
    held = {_name(torch, own): peaks.take(own)[1]}
    held |= {_name(torch, gpu): reserved for gpu, (_, reserved) in peaks.others(own)}
    path = os.path.join(recorder.settings["folder"], f"process{os.getpid()}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(held, file)


def _name(torch: Any, device: int) -> str:
    """Return the name of a GPU that all processes of the machine have for it."""
    return str(torch.cuda.get_device_properties(device).uuid)
