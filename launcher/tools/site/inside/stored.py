"""The templates that `launcher.tools.site.generate` has written."""

import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from launcher.forecast.trace.events import Compute, Place, Trace
from launcher.forecast.trace.kernels import partial_sums_bytes
from launcher.forecast.trace.template import Dimensions, Size, Template, filled, filled_work
from launcher.forecast.trace.work import Work
from launcher.model.config import ModelConfig
from launcher.tools.site.template import dimensions_of, from_json, kind_of, structure_of
from launcher.util.errors import UserError

DATA: Final = Path(__file__).parent / "traces.zip"
_UNKNOWN: Final = "this page does not know such a model: shardscale plan, on your machine, does"


def stored_trace(model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int) -> Trace:
    """Return what `trace_of` would.

    Raises:
        UserError: of a structure that is not stored.
    """
    template, dimensions = _asked(model, compute, micro_batch, seq_len)

    def partial_bytes(rows: int, columns: int, element_bytes: int) -> int:
        threads = compute.resident_threads
        return partial_sums_bytes(rows, columns, element_bytes, resident_threads=threads)

    return filled(template, dimensions, partial_bytes)


def stored_work(
    model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int
) -> dict[Place, Work]:
    """Return what `work_of` would.

    Raises:
        UserError: of a structure that is not stored.
    """
    return filled_work(*_asked(model, compute, micro_batch, seq_len))


def _asked(
    model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int
) -> tuple[Template, Dimensions]:
    template = _template(kind_of(model), structure_of(model, compute, seq_len=seq_len))
    return template, dimensions_of(model, micro_batch=micro_batch, seq_len=seq_len)


def stored_shapes(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return what `shapes_of_one_block` would."""
    dimensions = dimensions_of(model, micro_batch=1, seq_len=1)
    return [
        (name, tuple(Size(factor, tuple(names)).bytes(dimensions) for factor, *names in shape))
        for name, shape in _stored(kind_of(model))["shapes"]
    ]


@cache
def _template(kind: str, structure: str) -> Template:
    stored = _stored(kind)
    if structure not in stored["structures"]:
        raise UserError(_UNKNOWN)
    return from_json(stored["templates"][stored["structures"][structure]])


@cache
def _stored(kind: str) -> Any:
    with zipfile.ZipFile(DATA) as archive:
        try:
            return json.loads(archive.read(f"{kind}.json"))
        except KeyError:
            raise UserError(_UNKNOWN) from None
