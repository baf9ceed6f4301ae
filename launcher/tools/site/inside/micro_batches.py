"""In a browser: launcher/forecast/trace/micro_batches.py, from what was recorded before."""

from launcher.forecast.trace.events import Compute, Trace
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import ContextRank, TensorRank
from launcher.tools.site.inside.stored import stored_trace


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    part: ContextRank | None,
    share: TensorRank | None,
) -> Trace:
    """The trace of a model whose sequences and matrices nobody cuts."""
    assert part is None
    assert share is None
    return stored_trace(model, compute, micro_batch, seq_len)
