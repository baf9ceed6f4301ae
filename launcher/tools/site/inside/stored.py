"""Read stored traces and shapes in a browser, which can record none."""

from launcher.forecast.trace.events import TraceRequest
from launcher.forecast.trace.stored import (
    dimensions_of,
    kind_of,
    stored_kind,
    template_of_structure,
)
from launcher.forecast.trace.template import Size, Template
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError

_UNKNOWN = "this page does not know such a model: shardscale plan, on your machine, does"


def template_here(asked: TraceRequest) -> Template:
    """Return the template of a structure.

    Raises:
        UserError: it is not stored.
    """
    template = template_of_structure(asked)
    if template is None:
        raise UserError(_UNKNOWN)
    return template


def shapes_of_one_block(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return what `launcher.strategies.shapes` would.

    Raises:
        UserError: of a kind of decoder that is not stored.
    """
    dimensions = dimensions_of(model, micro_batch=1, seq_len=1)
    stored = stored_kind(kind_of(model))
    if "shapes" not in stored:
        raise UserError(_UNKNOWN)
    return [
        (name, tuple(Size(factor, tuple(names)).bytes(dimensions) for factor, *names in shape))
        for name, shape in stored["shapes"]
    ]
