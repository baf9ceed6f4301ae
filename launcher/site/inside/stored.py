"""The templates that `launcher.site.generate` has written."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from launcher.errors import UserError
from launcher.memory.gpu_kernels import partial_sums_bytes
from launcher.memory.trace_events import Compute, Trace
from launcher.model.config import ModelConfig
from launcher.site.template import (
    Size,
    Template,
    dimensions_of,
    filled,
    from_json,
    kind_of,
    structure_of,
)

DATA: Final = Path(__file__).parent / "traces.json.gz"


def stored_trace(model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int) -> Trace:
    """What `record_trace` would record.

    Raises:
        UserError: of a structure that is not stored.
    """
    template = _template(structure_of(model, compute, seq_len=seq_len))

    def partial_bytes(rows: int, columns: int, element_bytes: int) -> int:
        threads = compute.resident_threads
        return partial_sums_bytes(rows, columns, element_bytes, resident_threads=threads)

    dimensions = dimensions_of(model, micro_batch=micro_batch, seq_len=seq_len)
    return filled(template, dimensions, partial_bytes)


def stored_shapes(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """What `shapes_of_one_block` would say."""
    dimensions = dimensions_of(model, micro_batch=1, seq_len=1)
    return [
        (name, tuple(Size(factor, tuple(names)).bytes(dimensions) for factor, *names in shape))
        for name, shape in _stored()["shapes"][kind_of(model)]
    ]


@cache
def _template(structure: str) -> Template:
    stored = _stored()
    if structure not in stored["structures"]:
        raise UserError(
            "this page does not know such a model: shardscale plan, on your machine, does"
        )
    return from_json(stored["templates"][stored["structures"][structure]])


@cache
def _stored() -> Any:
    return json.loads(gzip.decompress(DATA.read_bytes()))
