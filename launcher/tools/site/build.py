"""Puts the page together: one file, with Python, the planner and its traces inside."""

import base64
import dataclasses
import gzip
from typing import Any, Final

from launcher.forecast.candidates import CHECKPOINTING, PRECISIONS
from launcher.measure.hardware import GPUS
from launcher.model.sizes import NAMED
from launcher.tools.site.bundle import planner_files
from launcher.tools.site.runtime import Runtime, zipped
from launcher.util.page import asset, page_html

_SCRIPTS: Final = ("site-pythons.js", "site-form.js", "site.js")
_DIMENSIONS: Final = (
    *("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "context"),
)


def site_html(runtime: Runtime) -> str:
    """The text of index.html."""
    worker = "\n".join([runtime.glue, runtime.loader, asset("site-worker.js")])
    blocks = {
        "worker": _packed(gzip.compress(worker.encode(), mtime=0)),
        "wasm": _packed(gzip.compress(runtime.wasm, mtime=0)),
        "library": _packed(runtime.library),
        "planner": _packed(zipped(planner_files())),
        "lock": runtime.lock,
    }
    return page_html(
        "shardscale: will it fit?",
        _SCRIPTS,
        _choices(),
        styles=("site.css",),
        blocks=blocks,
        # WebAssembly, and a worker that is made of text: it inherits this policy.
        policy="'wasm-unsafe-eval' blob:; worker-src blob:",
    )


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _choices() -> dict[str, Any]:
    """What the page's fields offer."""
    models = {}
    for name, model in NAMED.items():
        values = dataclasses.asdict(model)
        values |= {"kv_heads": model.kv_head_count, "head_dim": model.head_size}
        values |= {"d_ff": model.ffn_dim}
        models[name] = {field: values[field] for field in _DIMENSIONS}
    return {
        "models": models,
        "gpus": {gpu.name: gpu.memory_bytes for gpu in GPUS},
        "precisions": PRECISIONS,
        "checkpointing": CHECKPOINTING,
    }
