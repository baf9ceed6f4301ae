"""`rehearse()`: a notebook's cells as a program, on GPUs that are not there. And `%%rehearse`."""

import ast
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.tools.watch.watch_cli import split_command
from launcher.util.errors import ExitCode, UserError
from shardscale.tables import Table

NAME = "cell.py"
"""File of the program: `--answer cell.py:12=3.2` names a line of it."""
_REHEARSED = "SHARDSCALE_OBSERVER"


class RehearsalReport:
    """The report of a rehearsal; `record` has all of it, as `shardscale rehearse --json` prints."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Keep the record."""
        self.record = dict(record)

    @property
    def verdict(self) -> str | None:
        """`fits`, `tight` or `does not fit`; None where the program failed by itself."""
        found: str | None = self.record["verdict"]
        return found

    @property
    def fits(self) -> bool:
        """True where the program fits, if tightly."""
        return self.verdict in ("fits", "tight")

    @property
    def allocated_peak_bytes(self) -> int | None:
        """The most that tensors took on the GPU, of the worst rank."""
        return self._worst("allocated_peak_bytes")

    @property
    def reserved_peak_bytes(self) -> int | None:
        """The most that torch's allocator held on the GPU, of the worst rank."""
        return self._worst("reserved_peak_bytes")

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step, of the slowest rank; None where no step was seen whole."""
        known = [rank["seconds"]["total_s"] for rank in self.record["ranks"] if rank["seconds"]]
        return max(known, default=None)

    @property
    def gpus(self) -> Table:
        """The verdict on every GPU of the table, and seconds of a step; smallest first."""
        return Table(self.record["cards"])

    def _worst(self, name: str) -> int | None:
        known = [rank[name] for rank in self.record["ranks"] if rank[name] is not None]
        return max(known, default=None)

    def __repr__(self) -> str:
        return "\n".join(self.record["report"])


def rehearse(
    code: str | Sequence[str],
    *,
    gpu: str,
    gpus: int | None = None,
    steps: int = 3,
    answers: Mapping[str, float] | None = None,
    out: str | Path | None = None,
    command: Sequence[str] = (),
) -> RehearsalReport:
    """Run code unchanged on a GPU that is not there: torch's real allocator, no kernels run.

    The code is a program of its own, in a process that shares nothing with this one. In a notebook
    `In[1:5]` are the texts of four cells.

    Args:
        code: the text of a program, or of several cells in order.
        gpu: the GPU, such as `"H100"`.
        gpus: GPUs of the node; as many as `command` starts ranks by default, else 1.
        steps: optimizer steps after which the rehearsal ends.
        answers: values that the code reads from the device, by `"cell.py:LINE"`.
        out: a new run folder to keep, for `load()` and `shardscale report`; none by default.
        command: what starts the program's file, such as `["torchrun", "--nproc-per-node", "2"]`;
            this Python by default.

    Raises:
        UserError: a value that the command line would refuse, in the same words; torch without
            CUDA; code that is not Python.
    """
    words = ["--gpu", gpu, "--steps", str(steps)]
    words += [] if gpus is None else ["--gpus", str(gpus)]
    for place, value in (answers or {}).items():
        words += ["--answer", f"{place}={value}"]
    words += [] if out is None else ["--out", str(out)]
    return _rehearsed(code, words, command)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the magic `%%rehearse --gpu H100`, after `%load_ext shardscale`."""
    shell.register_magic_function(_rehearse_cell, "cell", "rehearse")


def _rehearse_cell(line: str, cell: str) -> RehearsalReport:
    """Rehearse a cell; the flags are those of `shardscale rehearse`."""
    words, command = split_command(shlex.split(line))
    try:
        return _rehearsed(cell, words, command)
    except UserError as error:
        from IPython.core.error import UsageError  # which a notebook shows without a traceback

        raise UsageError(str(error)) from None


def _rehearsed(
    code: str | Sequence[str], words: Sequence[str], command: Sequence[str]
) -> RehearsalReport:
    if _REHEARSED in os.environ:
        raise UserError("rehearse() is in the code that it rehearses: leave that cell out")
    text = program_text([code] if isinstance(code, str) else code)
    with tempfile.TemporaryDirectory(prefix="shardscale-") as folder:
        file = Path(folder) / NAME
        file.write_text(text, encoding="utf-8")
        keeps = any(word == "--out" or word.startswith("--out=") for word in words)
        where = () if keeps else ("--out", f"{folder}/run")
        program = (*(command or (sys.executable,)), str(file))
        printed = _run(("rehearse", "--json", *words, *where, "--", *program))
    record: dict[str, Any] = json.loads(printed.replace(str(file), NAME))  # its folder is gone
    if not keeps:
        report = [line for line in record["report"] if not line.startswith("run folder ")]
        record |= {"folder": None, "report": report}
    return RehearsalReport(record)


def program_text(cells: Sequence[str]) -> str:
    """Return cells as one program. Lines for IPython (`%matplotlib`, `!pip`) are left empty.

    Raises:
        UserError: a cell that is not Python or not text, or no code at all.
    """
    if not isinstance(cells, list | tuple) or not all(isinstance(cell, str) for cell in cells):
        raise UserError("rehearse() takes text, or a list of texts: give In[1:5]")
    text = "\n".join(map(_without_magics, cells))
    if not text.strip():
        raise UserError("rehearse() has no code to run: give the text of a program or of cells")
    return text + "\n"


def _without_magics(cell: str) -> str:
    lines = cell.split("\n")
    while True:
        try:
            tree = ast.parse("\n".join(lines))
            break
        except SyntaxError as error:
            number = (error.lineno or 1) - 1
            line = lines[number] if number < len(lines) else ""
            if not line.lstrip().startswith(("%", "!")):
                raise UserError(
                    f"line {number + 1} of a cell is not Python ({error.msg}): {line.strip()}"
                ) from None
            lines[number] = _run_by_line(line)
    # backwards: a call of `%%time` has all lines of its cell in one
    for node in reversed(tree.body):
        # As `In` has such lines.
        if ast.unparse(node).startswith("get_ipython()"):
            end = node.end_lineno or node.lineno
            called = _run_by_call(node).split("\n")
            blank = [""] * (end - node.lineno + 1 - len(called))
            lines[node.lineno - 1 : end] = [*called, *blank]
    return "\n".join(lines)


def _run_by_line(line: str) -> str:
    """Return the Python that a line for IPython runs: `%time step()` does, others none."""
    indent, code = line[: len(line) - len(line.lstrip())], line.strip()
    if code.startswith("%time "):
        return indent + code.removeprefix("%time ").lstrip()
    return f"{indent}pass" if indent else ""  # which may be all of a block


def _run_by_call(node: ast.stmt) -> str:
    """Return the Python that a call of `get_ipython()` runs, on the lines that it had in its cell;
    none but for magics of time and output."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return ""
    words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
    if call.func.attr == "run_cell_magic" and words[:1] in (["time"], ["timeit"], ["capture"]):
        return "\n" + _without_magics(words[-1].rstrip("\n"))
    if call.func.attr == "run_line_magic" and words[:1] == ["time"]:
        return words[-1]
    return ""


def _run(words: Sequence[str]) -> str:
    """Return what the verb prints.

    It is a process of its own, because it waits for signals, which a notebook's other threads get.
    """
    here = (os.getcwd(), os.environ.get("PYTHONPATH"))  # modules beside the notebook
    # A kernel's environment need not be an active one: its torchrun is beside its Python.
    programs = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, here)),
        "PATH": os.pathsep.join(programs),
    }
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        with subprocess.Popen(
            (sys.executable, "-m", "launcher", *words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            try:
                # Progress bars end in carriage returns, which are no ends of lines here.
                for line in io.TextIOWrapper(process.stderr, errors="replace", newline="\n"):
                    sys.stderr.write(last)
                    last = line
            except BaseException:
                process.terminate()
                raise
        sentence = last.strip().removeprefix("shardscale: ")
        if process.returncode == ExitCode.REFUSED:
            raise UserError(sentence)
        sys.stderr.write(last)
        printed.seek(0)
        text = printed.read()
    if not text:
        raise RuntimeError(f"shardscale rehearse ended with {process.returncode}: {sentence}")
    return text
