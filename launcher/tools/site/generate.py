"""Writes the templates of every structure that the page can be asked about: minutes, on all cores.

`python -m launcher.tools.site.generate` does it anew, after a change of the model, of a trace or of
what is planned; `tests/unit/tools/test_site.py` says when that is due.
"""

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.forecast.candidates import choices
from launcher.forecast.predict import traced
from launcher.forecast.trace import blocks as trace
from launcher.forecast.trace.events import Compute
from launcher.model.config import ModelConfig
from launcher.model.sizes import NAMED
from launcher.tools.site.inside.stored import DATA
from launcher.tools.site.recorded import SEQ_LEN, prime_model, record_template, shape_template
from launcher.tools.site.runtime import zipped
from launcher.tools.site.template import as_json, kind_of, structure_of
from launcher.util.processes import usable_cores
from launcher.util.startup import deaf_children, interruptible

_WORLD_SIZES = (1, 4)
_UNCUT = {"model", "context_parallel", "tensor_parallel"}
_LORA_RANK = 8


class _Collected(Exception):
    """What would be traced is known; nothing need be."""


def main() -> int:
    """Write the data, and say how much it is."""
    found = structures()
    kinds: dict[str, dict[str, Any]] = {}
    print(f"{len(found)} structures", file=sys.stderr)
    with deaf_children():
        workers = multiprocessing.get_context("fork").Pool(usable_cores())
    with workers as pool:
        templates = pool.imap(_recorded, found.values(), chunksize=4)
        for (structure, (model, _)), template in zip(found.items(), templates, strict=True):
            of_kind = kinds.setdefault(
                kind_of(model), {"shapes": _shapes(model), "structures": {}, "templates": []}
            )
            if template not in of_kind["templates"]:
                of_kind["templates"].append(template)
            of_kind["structures"][structure] = of_kind["templates"].index(template)
    texts = {
        f"{kind}.json": json.dumps(each, separators=(",", ":")) for kind, each in kinds.items()
    }
    DATA.write_bytes(zipped({name: text.encode() for name, text in texts.items()}))
    print(f"{DATA}: {DATA.stat().st_size:,} bytes", file=sys.stderr)
    return 0


def structures() -> dict[str, tuple[ModelConfig, Compute]]:
    """Structure -> what to record for it: everything that the planner's choices come to, of every
    kind of named model, with shared key heads and without, trained whole and with adapters."""
    found: dict[str, tuple[ModelConfig, Compute]] = {}
    for config in _configs():
        for run, world_size in _runs(config):
            model, compute, seq_len = _asked_of_trace(run, world_size)
            for padded in (False, True):
                low = compute.autocast or compute.params_dtype.itemsize == 2
                if padded and not low:
                    continue
                windowed = model.window is not None and model.window < seq_len - 1
                prime = prime_model(model, padded=padded, windowed=windowed)
                key = structure_of(prime, compute, seq_len=SEQ_LEN)
                found[key] = prime, replace(compute, resident_threads=0)
    return found


def _configs() -> Iterator[RunConfig]:
    seen = set()
    for name, model in NAMED.items():
        for kv_heads in (model.heads, model.heads // 2 if model.heads % 2 == 0 else 1):
            for lora_rank in (None, _LORA_RANK):
                config = RunConfig().replace(
                    model=name, kv_heads=kv_heads, layers=9, seq_len=128, lora_rank=lora_rank
                )
                kind = kind_of(config.model.build()), model.window is not None
                if kind not in seen:
                    seen.add(kind)
                    yield config
                    if model.window is not None:
                        yield config.replace(seq_len=2 * model.window)


def _runs(config: RunConfig) -> Iterator[tuple[Resolved, int]]:
    for world_size in _WORLD_SIZES:
        planned = choices(
            config, _UNCUT, world_size=world_size, ranks_per_node=8, device_type="cuda"
        )
        yield from ((choice.runs[0], world_size) for choice in planned)


def _asked_of_trace(run: Resolved, world_size: int) -> tuple[ModelConfig, Compute, int]:
    asked: list[Any] = []

    def note(*arguments: Any) -> None:
        asked.extend(arguments)
        raise _Collected

    with mock.patch.object(trace, "trace_of", note), contextlib.suppress(_Collected):
        traced(run, world_size=world_size, device_type="cuda")
    model, compute, _, seq_len, *_ = asked
    return model, compute, seq_len


def _recorded(structure: tuple[ModelConfig, Compute]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return as_json(record_template(*structure))


def _shapes(model: ModelConfig) -> list[tuple[str, list[tuple[Any, ...]]]]:
    return [
        (name, [(size.factor, *size.names) for size in shape])
        for name, shape in shape_template(model)
    ]


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
