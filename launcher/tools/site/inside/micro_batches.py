"""In a browser: launcher/forecast/trace/micro_batches.py, from what was recorded before."""

from launcher.forecast.trace.events import Place, Trace, TraceRequest
from launcher.forecast.trace.stored import trace_from, work_from
from launcher.forecast.trace.work import Work
from launcher.parallel.mesh import WHOLE_MODEL
from launcher.tools.site.inside.stored import template_here


def trace_of(asked: TraceRequest) -> Trace:
    """Return the trace of a model on a single model-parallel rank."""
    assert asked.rank == WHOLE_MODEL
    return trace_from(template_here(asked), asked)


def work_of(asked: TraceRequest) -> dict[Place, Work]:
    """Work of its segments."""
    assert asked.rank == WHOLE_MODEL
    return work_from(template_here(asked), asked)
