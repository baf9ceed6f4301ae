"""In a browser: launcher/memory/micro_batches.py, from what was recorded before."""

from launcher.memory.trace_events import Compute, Trace
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import Share, Slice
from launcher.site.inside.stored import stored_trace


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    part: Slice | None,
    share: Share | None,
) -> Trace:
    """The trace of a model whose sequences and matrices nobody cuts."""
    assert part is None
    assert share is None
    return stored_trace(model, compute, micro_batch, seq_len)
