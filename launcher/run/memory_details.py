"""What an out-of-memory report knows about memory at the moment of failure."""

from typing import Any

from launcher.measure.memory import MemoryMeter, TracedMemory


def memory_details(memory: MemoryMeter, *, where: str, step: int) -> dict[str, Any]:
    """The ledger, and with `--memory-trace` the largest tensors."""
    ledger = memory.now()
    details: dict[str, Any] = {
        "where": where,
        "step": step,
        "ledger": None if ledger is None else {**ledger.as_dict(), "moment": "oom"},
    }
    if isinstance(memory, TracedMemory):
        details["largest_tensors"] = [
            {
                "bytes": live.size_bytes,
                "shape": live.shape,
                "dtype": live.dtype,
                "born_in": live.phase,
                "module": live.module,
            }
            for live in memory.trace.largest(10)
        ]
    return details
