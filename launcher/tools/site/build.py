"""Compose the page: one file that holds Python, the planner's modules and stored traces."""

import base64
import dataclasses
import gzip
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import launcher
from launcher.forecast.candidates import CHECKPOINTING, PRECISIONS
from launcher.forecast.trace.stored import DATA
from launcher.measure.hardware import GPUS
from launcher.model.names import DATA as NAMES
from launcher.model.sizes import NAMED
from launcher.strategies import STRATEGIES
from launcher.tools.site.inside.answer import assessed, choices_of
from launcher.tools.site.runtime import Runtime, zipped
from launcher.util.page import asset, page_html

_ROOT: Final = Path(launcher.__file__).parent
_SUBSTITUTES: Final = {
    "launcher/forecast/trace/micro_batches.py": "launcher/tools/site/inside/micro_batches.py",
    "launcher/strategies/shapes.py": "launcher/tools/site/inside/shapes.py",
}
"""Module that needs torch -> its substitute without."""
_LEFT_OUT: Final = (
    *("__main__", "checkpoint", "compare", "data", "forecast/trace/record", "probe", "run"),
    *("torchrun", "train", "util/page/assets"),
    *(f"tools/{tool.name}" for tool in (_ROOT / "tools").glob("[!_]*") if tool.name != "site"),
    *(f"tools/site/{name}" for name in ("assets", "build", "generate", "runtime", "site_cli")),
)
_SCRIPTS: Final = ("site-pythons.js", "site-form.js", "site.js")
_FIRST: Final = (
    *("--model", "gpt2-xl", "--gpu", "A100-80GB", "--gpus", "4", "--precision", "bf16"),
)
"""The question of the page's default fields (site-form.js), answered before Python has started."""
_DIMENSIONS: Final = (
    *("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "context"),
)


def site_html(runtime: Runtime) -> str:
    """Return the text of index.html."""
    worker = "\n".join([runtime.glue, runtime.loader, asset("site-worker.js")])
    blocks = {
        # mtime=0: equal sources give an equal page
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
        # WebAssembly, and a worker made of text, which inherits this policy.
        policy="'wasm-unsafe-eval' blob:; worker-src blob:",
    )


def planner_files() -> dict[str, bytes]:
    """Return name -> content of the planner's modules without torch, for a folder on Python's path.

    With the stored traces, and metadata of the libraries whose versions predictions check.
    """
    found = {f"launcher/{name}": _ROOT / name for name in sorted(_sources(_ROOT))}
    found |= {name: _ROOT.parent / other for name, other in _SUBSTITUTES.items()}
    files = {name: path.read_bytes() for name, path in found.items()}
    files[f"launcher/{DATA.relative_to(_ROOT)}"] = DATA.read_bytes()
    files["launcher/model/names.jsonl"] = _own_names()
    for library in sorted({name for each in STRATEGIES.values() for name in each.follows}):
        version = metadata.version(library)
        text = f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n"
        files[f"{library}-{version}.dist-info/METADATA"] = text.encode()
    return files


def _own_names() -> bytes:
    """Return the names of our own decoder: a browser has no transformers."""
    lines = NAMES.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if "sizes" in json.loads(line))


def _sources(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():  # a link among them, which rglob would not follow
        name = str(path.relative_to(_ROOT))
        if name.startswith(_LEFT_OUT) or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield name


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _choices() -> dict[str, Any]:
    """Return the options of the page's fields."""
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
        "first": _first(),
    }


def _first() -> dict[str, Any]:
    """Return the first question, what the planner says of it, and its fastest candidates."""
    argv = json.dumps(_FIRST)
    about = json.loads(choices_of(argv))
    rows = [json.loads(assessed(argv, number)) for number in range(len(about["choices"]))]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["tokens_per_s"] is not None:
            other = best.setdefault(row["sharding"], row)
            best[row["sharding"]] = max(other, row, key=lambda each: each["tokens_per_s"])
    return {"argv": _FIRST, "about": about, "rows": list(best.values())}
