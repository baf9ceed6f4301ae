"""Traces that come with the package, which spare a plan to record them, and to import what does.

Recorded once with dimensions that are distinct primes, a trace serves for all models of the same
structure (`launcher.forecast.trace.template`). `launcher.tools.site.generate` records those of the
named models; they are used where this torch and these sources would record the same. No torch is
needed for that, so that a browser can do it.
"""

import hashlib
import json
import zipfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch

from launcher.forecast.trace.events import Compute, Place, Trace, TraceRequest
from launcher.forecast.trace.template import (
    Dimensions,
    Template,
    filled,
    filled_work,
    loss_chunks,
)
from launcher.forecast.trace.template_json import from_json
from launcher.forecast.trace.work import Work
from launcher.forecast.trace.workspaces import workspace_bytes
from launcher.model.attention.dense import ROW_ALIGNMENT
from launcher.model.casts import MOST_ELEMENTS
from launcher.model.config import ModelConfig
from launcher.model.fused import MOST_WIDTH
from launcher.model.products import linear_products
from launcher.parallel.mesh import WHOLE_MODEL

DATA: Final = Path(__file__).with_name("traces.zip")
ORIGIN: Final = "origin.json"
"""Names the torch and the sources that have recorded the data."""
_RECORD_ALIKE: Final = ("2.13", "2.14", "2.15")
"""Versions of torch that record the same, but for the order in which a block frees tensors."""
_PACKAGE: Final = Path(__file__).parents[2]
_RECORDS: Final = (
    *("forecast/trace/*.py", "model/*.py", "model/attention/*.py", "measure/live_trace.py"),
    *("parallel/model_parallel.py", "strategies/build_inputs.py"),
)
"""Sources that run while a trace is recorded."""
ALIGNED_VOCAB: Final = 8
PADDED_VOCAB: Final = 64
"""A head's weight in bf16 whose rows are no multiple of the one is padded to one of the other:
`padded_size` in launcher/model/loss.py."""

# Fields that a structure's name or its dimensions describe, or on which no size depends.
_DESCRIBED: Final = (
    *("activation", "position", "norm", "qk_norm", "tied", "bias", "attention", "window"),
    *("activation_checkpointing", "vocab_size", "context", "layers", "heads", "kv_heads"),
    *("head_dim", "d_model", "d_ff", "loss_chunk", "rope_theta", "rope_scaling", "norm_eps"),
)


def stored_trace(asked: TraceRequest) -> Trace | None:
    """Return what `micro_batches.trace_of` would; None where it is not stored."""
    template = stored_template(asked)
    return None if template is None else trace_from(template, asked)


def stored_work(asked: TraceRequest) -> dict[Place, Work] | None:
    """Return what `micro_batches.work_of` would; None where it is not stored."""
    template = stored_template(asked)
    return None if template is None else work_from(template, asked)


def stored_template(asked: TraceRequest) -> Template | None:
    """Return the template of a micro-batch; None where anything but the name of its structure and
    its dimensions makes the trace what it is, or would be recorded otherwise here."""
    model, compute, _, seq_len, rank = asked
    described = (
        rank == WHOLE_MODEL
        and type(model) is ModelConfig
        and model == _as_described(model)
        and model.loss_chunk != 0
        and model.kv_head_count > 1  # else what is transposed need not be copied
        and model.d_model <= MOST_WIDTH
        and model.head_size % 8 == 0  # else a kernel may not take them
        # at other lengths the rows of a window's mask are padded
        and (not _is_windowed(model, seq_len) or seq_len % ROW_ALIGNMENT == 0)
        and compute == _compute_as_described(compute)
    )
    return template_of_structure(asked) if described and _is_of_today() else None


def trace_from(template: Template, asked: TraceRequest) -> Trace:
    """Return the trace of a model by the template of its structure."""
    return filled(template, _dimensions(asked), partial(workspace_bytes, compute=asked.compute))


def work_from(template: Template, asked: TraceRequest) -> dict[Place, Work]:
    """Return the work of each segment of a model by the template of its structure."""
    return filled_work(template, _dimensions(asked))


def _dimensions(asked: TraceRequest) -> Dimensions:
    return dimensions_of(asked.model, micro_batch=asked.micro_batch, seq_len=asked.seq_len)


def template_of_structure(asked: TraceRequest) -> Template | None:
    """Return the template of a structure, whatever has recorded it; None if it is not stored."""
    structure = structure_of(asked.model, asked.compute, seq_len=asked.seq_len)
    return _template(kind_of(asked.model), structure)


@cache
def _template(kind: str, structure: str) -> Template | None:
    number = (stored := stored_kind(kind))["structures"].get(structure)
    return None if number is None else from_json(stored["templates"][number])


@cache
def stored_kind(kind: str) -> Any:
    """Return all that is stored of a kind of decoder; no structure of one that is not."""
    with zipfile.ZipFile(DATA) as archive:
        name = f"{kind}.json"
        return json.loads(archive.read(name)) if name in archive.namelist() else {"structures": {}}


def _as_described(model: ModelConfig) -> ModelConfig:
    lora = None if model.lora is None else replace(model.lora, dropout=0.0)
    return ModelConfig(**{name: getattr(model, name) for name in _DESCRIBED}, lora=lora)


def _compute_as_described(compute: Compute) -> Compute:
    names = ["params_dtype", "frozen_dtype", "autocast", "stage3", "resident_threads"]
    names += ["heads_apart", "kept_share"]  # the latter of compiled blocks
    return Compute(device_type="cuda", **{name: getattr(compute, name) for name in names})


@cache
def _is_of_today() -> bool:
    with zipfile.ZipFile(DATA) as archive:
        return bool(json.loads(archive.read(ORIGIN)) == origin())


def origin() -> dict[str, str]:
    """Return what decides how a trace is recorded: torch's version, and a digest of the sources."""
    minor = ".".join(torch.__version__.split(".")[:2])
    version = " or ".join(_RECORD_ALIKE) if minor in _RECORD_ALIKE else minor
    digest = hashlib.sha256()
    for pattern in _RECORDS:
        for source in sorted(_PACKAGE.glob(pattern)):
            digest.update(source.read_bytes())
    return {"torch": version, "sources": digest.hexdigest()}


def _is_windowed(model: ModelConfig, seq_len: int) -> bool:
    return model.window is not None and model.window < seq_len - 1


def dimensions_of(model: ModelConfig, *, micro_batch: int, seq_len: int) -> Dimensions:
    """The dimensions that sizes are products of."""
    chunk, last, chunks = loss_chunks(model, micro_batch * seq_len, None)
    padded = -(-model.vocab_size // PADDED_VOCAB) * PADDED_VOCAB
    groups = model.heads // model.kv_head_count
    return {
        "micro_batch": micro_batch,
        "seq_len": seq_len,
        "d_model": model.d_model,
        "kv_heads": model.kv_head_count,
        "heads_per_kv": groups,
        "rotated_per_kv": groups + 1,
        "qkv_per_kv": groups + 2,
        "head_size": model.head_size,
        "window": model.window or 0,
        "d_ff": model.ffn_dim,
        "vocab": model.vocab_size,
        "padded_vocab": padded,
        "context": model.context,
        "rank": 0 if model.lora is None else model.lora.rank,
        "chunk": chunk,
        "last_chunk": last,
        "chunks": chunks,
    }


def kind_of(model: ModelConfig) -> str:
    """Return what a model's parameters depend on beside its dimensions."""
    flags = {
        "rope": model.position == "rope",
        "scaled": model.rope_scaling is not None,
        "rms": model.norm == "rms",
        "qk_norm": model.qk_norm,
        "grouped": model.kv_head_count < model.heads,
        "tied": model.tied,
        "qkv_bias": model.has_bias("qkv"),
        "attention_bias": model.has_bias("proj"),
        "mlp_bias": model.has_bias("mlp"),
    }
    adapters = "" if model.lora is None else "lora=" + ",".join(model.lora.targets)
    return " ".join([model.activation, adapters, *(name for name, has in flags.items() if has)])


def structure_of(
    model: ModelConfig, compute: Compute, *, seq_len: int, most_together: int = MOST_ELEMENTS
) -> str:
    """Return what a trace depends on beside its dimensions: with the same, it is one template.

    Args:
        model: with as few blocks as are traced.
        most_together: elements of the largest weight that autocast casts with others.
    """
    low = compute.autocast or compute.params_dtype.itemsize == 2
    flags = {
        "padded": low and model.vocab_size % ALIGNED_VOCAB != 0,
        "windowed": _is_windowed(model, seq_len),
        "stage3": compute.stage3,
        "autocast": compute.autocast,
        "low": compute.params_dtype.itemsize == 2,
        "frozen_low": compute.frozen_dtype.itemsize == 2 and model.lora is not None,
    }
    words = [kind_of(model), model.attention, str(model.layers), model.activation_checkpointing]
    if compute.autocast and model.lora is None:
        weights = [product.weights for product in linear_products(model)]
        words += [f"apart-{n}" for n, size in enumerate(weights) if size > most_together]
    return " ".join([*words, *(name for name, has in flags.items() if has)])
