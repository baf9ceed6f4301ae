"""Try each architecture of transformers that the tests know, and ten and more besides: train, plan,
generate, export, shard by tensor and by sequence, LoRA. docs_pages.py makes the table of it.

What is accepted by tensor or sequence has its loss and gradients computed over two shards, too.

    python bench/architectures.py [NAME...]
"""

import atexit
import contextlib
import json
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runs import ROOT

sys.path.append(str(ROOT / "tests"))
from rank_threads import require_matrix_parity, require_sequence_parity
from tiny_architectures import ARCHITECTURES, MORE

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.reading import foreign_config
from launcher.util.errors import UserError

RESULT = ROOT / "bench" / "results" / "architectures.json"
MOST_S = 180
"""Time limit of one command."""
ON_TWO: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"strategy": "ddp", "tensor_parallel": 2},
    "sequence": {"strategy": "ddp", "context_parallel": 2},
    "LoRA": {"strategy": "ddp", "lora_rank": 4, "random_base": True},
}
"""Accepted or rejected before anything starts; not run."""
ALONE: Mapping[str, Any] = {
    **{"output_router_logits": False, "attention_dropout": 0.0, "residual_dropout": 0.0}
}
"""Fields with which shards can be held against the whole."""
COLUMNS = ("trains", "plans", "generates", "exports", *ON_TWO)


def in_fork(work: Callable[[], object], log: Path) -> str | None:
    """Run work in a copy of this process, which has imported everything; return why it failed."""
    if (child := os.fork()) == 0:
        atexit._clear()  # what a command calls at its end would delete the parent's folder
        code = 1
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(MOST_S)
        try:
            work()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0) if not isinstance(stop.code, str) else 1
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] == 0:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("shardscale: ") if lines else "it was killed"


def command(module: str, *argv: object) -> Callable[[], None]:
    """A command line of the launcher."""

    def run() -> None:
        sys.argv = [module, *map(str, argv)]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return run


def loads(folder: Path) -> None:
    """Require transformers to load a folder, with nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {name: keys for name, keys in found.items() if keys}
    if wrong:
        raise ValueError(f"from_pretrained: {wrong}")


def refused(model: Path) -> dict[str, str | None]:
    """Column of ON_TWO -> None, or the sentence that rejects it."""
    found: dict[str, str | None] = dict.fromkeys(ON_TWO)
    for name, changes in ON_TWO.items():
        config: dict[str, Any] = {
            "model": str(model),
            "decoder": "transformers",
            "seq_len": 16,
            **changes,
        }
        try:
            resolve(RunConfig().replace(**config), world_size=2, device_type="cpu")
        except UserError as refusal:
            found[name] = str(refusal)
    return found


def parity(require: Callable[[ForeignConfig], None], fields: Mapping[str, Any]) -> None:
    """Hold two ranks of an architecture against one."""
    import torch

    torch.set_num_threads(1)  # a fork makes its pool anew: before the threads of two ranks ask
    require(foreign_config({**fields, **ALONE}))


def tried(fields: Mapping[str, Any], folder: Path) -> dict[str, str | None]:
    """Column -> None, or why it does not work."""
    model, run, out = folder / "model", folder / "run", folder / "export"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(fields))
    (folder / "text.txt").write_text("to be or not to be, that is the question\n\n" * 200)
    of_model = ("--model", model, "--decoder", "transformers")
    small = ("--seq-len", 16, "--micro-batch", 2, "--global-batch", 2)
    on_cpu = ("--device", "cpu", "--tokenizer", "byte", "--data", folder / "text.txt")
    more = ("--steps", 3, "--out", run, "--test-batches", 1)
    machine = ("--gpus", 2, "--gpu-memory", "24GiB", "--strategy", "fsdp", "--precision", "bf16")
    log = folder / "log.txt"
    found = {
        "trains": in_fork(command("launcher.train", *of_model, *small, *on_cpu, *more), log),
        "plans": in_fork(
            command("launcher", "plan", *of_model, *small[:4], "--global-batch", 4, *machine), log
        ),
    }
    if found["trains"] is None:
        generate = ("generate", run, "--prompt", "to be", "--max-tokens", 4)
        found["generates"] = in_fork(command("launcher", *generate), log)
        export = ("export", run, "--out", out, "--tokenizer", "none")
        found["exports"] = in_fork(command("launcher", *export), log)
        if found["exports"] is None:
            found["exports"] = in_fork(lambda: loads(out), log)
    (model / "config.json").write_text(json.dumps({**fields, **ALONE}))
    found |= refused(model)
    for column, require in (
        ("tensor", require_matrix_parity),
        ("sequence", require_sequence_parity),
    ):
        if found[column] is None:
            found[column] = in_fork(partial(parity, require, fields), log)
    return {
        name: None if why is None else why.replace(str(folder), "") for name, why in found.items()
    }


def table(_: Sequence[str]) -> str:
    """A row per architecture, and below why a command failed or was rejected."""
    results: Mapping[str, Mapping[str, str | None]] = json.loads(RESULT.read_text())
    lines = [f"| architecture | {' | '.join(COLUMNS)} |", f"|---|{len(COLUMNS) * '---|'}"]
    notes: dict[str, list[str]] = {}
    for name, found in sorted(results.items()):
        cells = ["✓" if found.get(column, "") is None else "✗" for column in COLUMNS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
        for why in dict.fromkeys(filter(None, map(found.get, COLUMNS))):
            short = re.sub(
                r"\w+ForCausalLM of transformers|\w+LMHeadModel of transformers", "it", why
            )
            notes.setdefault(short.removeprefix("--model /model: "), []).append(name)
    said = [f"- {', '.join(f'`{n}`' for n in names)}: {why}" for why, names in notes.items()]
    return "\n".join(["", *lines, "", *said, *([""] if said else [])])


def main(names: Sequence[str]) -> None:
    # Children copy this process, so that each begins at once.
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)  # a copy waits forever for threads that it does not have
    import launcher.train  # noqa: F401

    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, fields in {**ARCHITECTURES, **MORE}.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[name] = tried(fields, Path(folder))
        failed = [column for column, why in results[name].items() if why is not None]
        print(name, "without " + ", ".join(failed) if failed else "all", flush=True)
        RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
