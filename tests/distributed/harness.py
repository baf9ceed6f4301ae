"""Starting ranks, the small model and text that they train on, and what they report."""

import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "bench" / "shakespeare.txt"
TORCHRUN = Path(sysconfig.get_path("scripts")) / "torchrun"
TIMEOUT_S = 900.0  # only ends what hangs; nothing asserts how long a run takes

MODEL_FLAGS = (
    "--layers=2",
    "--d-model=64",
    "--heads=4",
    "--context=32",
    "--vocab-size=260",
    "--tokenizer=byte",
    "--device=cpu",
)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results that ranks have reported into a folder, one dictionary for each."""

    folder: Path
    found: list[dict[str, Any]]
    output: str

    @classmethod
    def of(cls, folder: Path, *ended: "subprocess.CompletedProcess[str]") -> "Results":
        """Return what process groups that have ended have left in `folder`."""
        files = sorted(folder.glob("results-*.jsonl"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        output = "\n".join(f"{e.args} ended with {e.returncode}:\n{e.stderr}" for e in ended)
        return cls(folder=folder, found=list(map(json.loads, lines)), output=output)

    def get(self, **key: Any) -> dict[str, Any]:
        """The result that has these values; the test fails where there is none, or an error."""
        for result in self.found:
            if key.items() <= result.items():
                if "error" in result:
                    pytest.fail(f"{key} raised:\n{result['error']}")
                return result
        pytest.fail(f"no result of {key}:\n{self.output[-6000:]}")


def selected(request: pytest.FixtureRequest, *tests: str) -> list[dict[str, Any]]:
    """Parameters of the module's tests (of these names, or all) that are to be run here."""
    return [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
        and (not tests or item.originalname in tests)
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]


def write_text(path: Path) -> Path:
    """Copy 100 kB of real text."""
    shutil.copyfile(TEXT, path)
    return path


def write_examples(path: Path) -> Path:
    """Real text cut into prompts and completions so unevenly that sequences of 32 bytes have one
    target or all of them."""
    text = write_text(path.with_suffix(".source")).read_text(encoding="utf-8")
    records: list[dict[str, str]] = []
    begin = 0
    while begin + 200 < len(text):
        prompt, completion = (4, 90) if len(records) % 4 == 0 else (70, 1)
        middle, end = begin + prompt, begin + prompt + completion
        learned = text[middle:end].strip() or "."
        records.append({"prompt": text[begin:middle], "completion": learned})
        begin = end
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without what would make a child believe it is a rank."""
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks: int, *command: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """`torchrun --nproc RANKS COMMAND`, to its end."""
    return run([TORCHRUN, "--nproc", str(ranks), *command], **more)


def train(ranks: int, *flags: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """`torchrun --nproc RANKS -m launcher.train FLAGS`, or without torchrun if RANKS is 1; forked,
    as by `run_ranks`."""
    return forked(ranks if ranks > 1 else 0, "launcher.train", *flags, **more)


def verb(*command: object, **more: str) -> "subprocess.CompletedProcess[str]":
    """`shardscale VERB ...`, forked, as by `run_ranks`."""
    return forked(0, "launcher.__main__", *command, **more)


def run_ranks(*groups: Sequence[object], **more: str) -> "subprocess.CompletedProcess[str]":
    """Groups of (ranks, NAME of NAME.py, argument, ...), one after the other, each to its end.

    They begin as forks of one process (`forked_ranks.py`), where torchrun would have each import
    all modules; tests of what a user starts take torchrun.
    """
    ended = [forked(*group, **more) for group in groups]
    return subprocess.CompletedProcess(
        [one.args for one in ended],
        next((one.returncode for one in ended if one.returncode), 0),
        "".join(one.stdout for one in ended),
        "".join(one.stderr for one in ended),
    )


def forked(
    ranks: object, module: object, *arguments: object, **more: str
) -> "subprocess.CompletedProcess[str]":
    """One group of ranks to its end, or one process if `ranks` is 0."""
    return _forked(ranks, module, arguments, more, apart=False)


def forked_apart(
    ranks: int, module: str, *arguments: object, **more: str
) -> "subprocess.CompletedProcess[str]":
    """Ranks without an agent: one that fails ends no other, and all must end with one exit code."""
    return _forked(ranks, module, arguments, more, apart=True)


def _forked(
    ranks: object,
    module: object,
    arguments: Sequence[object],
    more: Mapping[str, str],
    *,
    apart: bool,
) -> "subprocess.CompletedProcess[str]":
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        request = {"ranks": ranks, "module": module, "arguments": list(map(str, arguments))}
        request |= {
            "environment": environment(**more),
            "output": str(output),
            "errors": str(errors),
            "apart": apart,
        }
        answer = ""
        try:
            print(json.dumps(request), file=server.stdin, flush=True)
            if select.select([server.stdout], [], [], TIMEOUT_S)[0]:
                answer = server.stdout.readline()
        finally:
            if not answer:
                end(server)
                _server.cache_clear()
        assert answer, f"{module} has not ended after {TIMEOUT_S:.0f} s, or its parent has"
        read = [p.read_text(encoding="utf-8") if p.exists() else "" for p in (output, errors)]
    asked = [str(part) for part in (ranks, module, *arguments)]
    return subprocess.CompletedProcess(asked, int(answer), *read)


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """The process that all ranks of a test run are forked from."""
    path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
    server = subprocess.Popen(
        [sys.executable, str(HERE / "forked_ranks.py")],
        env=environment(PYTHONPATH=path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def python(*command: str | Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """This interpreter with `command`, to its end."""
    return run([sys.executable, *command], **more)


def run(command: Sequence[str | Path], **more: str) -> "subprocess.CompletedProcess[str]":
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a process, and torchrun's ranks, too, which have sessions of their own."""
    for one in psutil.Process(process.pid).children(recursive=True):
        one.kill()
    process.kill()
