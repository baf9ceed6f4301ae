"""In a browser: launcher/forecast/trace/micro_batches.py, from what was recorded before."""

from launcher.forecast.trace.events import Compute, Place, Trace
from launcher.forecast.trace.work import Work
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank
from launcher.tools.site.inside.stored import stored_trace, stored_work


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> Trace:
    """The trace of a model on a single model-parallel rank."""
    assert rank == WHOLE_MODEL
    return stored_trace(model, compute, micro_batch, seq_len)


def work_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> dict[Place, Work]:
    """Work of its segments."""
    assert rank == WHOLE_MODEL
    return stored_work(model, compute, micro_batch, seq_len)
