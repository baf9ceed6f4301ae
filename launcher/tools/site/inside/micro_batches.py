"""In a browser: launcher/forecast/trace/micro_batches.py, from what was recorded before."""

from launcher.forecast.trace.events import Compute, Place, Trace
from launcher.forecast.trace.stored import trace_from, work_from
from launcher.forecast.trace.work import Work
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank
from launcher.tools.site.inside.stored import template_here


def trace_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> Trace:
    """Return the trace of a model on a single model-parallel rank."""
    assert rank == WHOLE_MODEL
    template = template_here(model, compute, seq_len)
    return trace_from(template, model, compute, micro_batch, seq_len)


def work_of(
    model: ModelConfig,
    compute: Compute,
    micro_batch: int,
    seq_len: int,
    rank: ModelParallelRank,
) -> dict[Place, Work]:
    """Work of its segments."""
    assert rank == WHOLE_MODEL
    return work_from(template_here(model, compute, seq_len), model, micro_batch, seq_len)
