"""The command line `python -m launcher VERB`: verbs and their modules."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launcher.util.errors import ExitCode, tell
from launcher.util.startup import importing, interruptible, leave_with, reader_may_leave

ALL_VERBS = {
    "plan": (
        "launcher.forecast.plan_cli",
        "predict what fits, how close and how fast, without a GPU",
    ),
    "train": ("launcher.train", "train in this process: one GPU, or the CPU"),
    "recipe": (
        "launcher.tools.recipe.recipe_cli",
        "list or print files of --config to begin with",
    ),
    "run": ("launcher.torchrun", "start ranks: takes torchrun's own arguments"),
    "sweep": (
        "launcher.compare.sweep.sweep_cli",
        "train every cell of a grid, in sequence",
    ),
    "report": (
        "launcher.compare.report.report_cli",
        "compare runs: a table, a page, CSV, Markdown, JSON",
    ),
    "site": (
        "launcher.tools.site.site_cli",
        "write a page that plans in a browser, without a server",
    ),
    "matrix": (
        "launcher.compare.sweep.matrix_cli",
        "show the compatibility of techniques and strategies",
    ),
    "prune": (
        "launcher.tools.prune.prune_cli",
        "remove weights, heads or hidden units of a trained model",
    ),
    "export": (
        "launcher.tools.exchange.export_cli",
        "write a checkpoint for transformers, ONNX or TensorRT",
    ),
    "import": (
        "launcher.tools.exchange.import_cli",
        "turn a model of transformers into a run folder",
    ),
    "generate": (
        "launcher.tools.generate.generate_cli",
        "continue prompts with a run, a checkpoint or an export",
    ),
    "infer-bench": (
        "launcher.tools.serve.infer_bench_cli",
        "memory, latency, perplexity in PyTorch, ONNX Runtime, TensorRT",
    ),
    "submit": (
        "launcher.tools.submit.submit_cli",
        "check a training or a sweep and submit it to Slurm",
    ),
    "rehearse": (
        "launcher.tools.rehearse.rehearse_cli",
        "run any PyTorch program on GPUs that are not there: does it fit?",
    ),
    "watch": (
        "launcher.tools.watch.watch_cli",
        "run any PyTorch program; record its memory, phases and steps",
    ),
    "snapshot": (
        "launcher.tools.snapshot.snapshot_cli",
        "show torch's memory snapshot: timeline, peak, lifetimes",
    ),
    "profile": ("launcher.forecast.profile_cli", "measure this machine for the planner"),
    "completion": (
        "launcher.tools.completion",
        "print a shell completion script",
    ),
    "doctor": (
        "launcher.tools.doctor.doctor_cli",
        "check this machine: what will not work, and how to fix it",
    ),
}
"""Verb -> its module, and what it does."""
BY_OPTION = {
    "plan": {
        "--from": "launcher.tools.plan_from.plan_from_cli",
        "--check": "launcher.tools.plan_from.plan_from_cli",
        "--rent": "launcher.tools.rent.rent_cli",
    },
}
"""Verb -> options that another module answers."""
_TRAINERS = ("launch", "run", "fit", "finetune", "pretrain", "sft")
"""Names of `train` in other programs."""


def _is_present(module: str) -> bool:
    # By its file: `find_spec` would import the packages around it.
    root = Path(__file__).parents[1]
    return (root / f"{module.replace('.', '/')}.py").is_file()


# Every tool is a folder that can be left out, and its verb goes with it.
VERBS = {verb: entry for verb, entry in ALL_VERBS.items() if _is_present(entry[0])}


def main() -> NoReturn:
    """Dispatch to a verb's `main`; only that verb's modules are imported."""
    if Path(sys.argv[0]).name == "memscale":
        tell("memscale is its old name, which goes with 0.3")
    verb, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    try:
        with reader_may_leave():
            code = _run(verb, arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise  # Python prints the text and exits with 1
        code = end.code or ExitCode.DONE
    leave_with(code)


def _run(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb; return its exit code."""
    if verb in ("-h", "--help"):
        print(usage())
        return ExitCode.DONE
    if verb in ("-V", "--version"):
        print(importlib.import_module("launcher.util.packages").version_line())
        return ExitCode.DONE
    if verb in ALL_VERBS and verb not in VERBS:
        lacks = f"{verb} is not in this installation, which lacks {ALL_VERBS[verb][0]}"
        tell(f"{lacks}: reinstall shardscale")
        return ExitCode.REFUSED
    if verb not in VERBS:
        close = ["train"] if verb in _TRAINERS else difflib.get_close_matches(verb, VERBS, n=1)
        instead = f"did you mean {close[0]}?" if close else f"use {', '.join(VERBS)}"
        tell(f"unknown verb {verb!r}: {instead}")
        return ExitCode.REFUSED
    # launcher.train imports torch before its `main` can answer
    if verb == "train":
        importlib.import_module("launcher.config.arguments").print_help_if_asked(arguments)
    with importing():
        module = importlib.import_module(_module_of(verb, arguments))
    with interruptible():
        code: int = module.main(arguments)
    return code


def _module_of(verb: str, arguments: Sequence[str]) -> str:
    names = [token.partition("=")[0] for token in arguments]
    answered = [module for option, module in BY_OPTION.get(verb, {}).items() if option in names]
    return next(filter(_is_present, answered), VERBS[verb][0])


def usage() -> str:
    """Return the text of `--help`."""
    lines = [
        "usage: shardscale VERB [arguments]      (also: python -m launcher VERB)",
        "",
        *(f"  {verb:11} {what}" for verb, (_, what) in VERBS.items()),
        "",
        "shardscale VERB --help says more; shardscale --version. On several GPUs:",
        "",
        "  torchrun --nproc 4 -m launcher.train --zero 2",
        "  shardscale run --nproc 4 -m launcher.train --zero 2      (the same)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
