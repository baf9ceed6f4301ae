"""Every command of the README is run as it stands, in order, in one folder, and prints what the
README says. What needs GPUs, Slurm or long says so there, and is checked."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.torchrun import split_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
MEASURED = ("memory", "tps", "slow", "elapsed", "left")
"""Of a step's line: another machine has others."""


@dataclass(frozen=True)
class Command:
    """One command line, and the lines that it is said to print."""

    text: str
    printed: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        return "(needs " not in self.text and not self.text.startswith("make ")


def commands() -> Iterator[Command]:
    for language, block in FENCE.findall(README):
        if language != "sh":
            continue
        lines = block.replace("\\\n", " ").splitlines()
        shown = any(line.startswith("$ ") for line in lines)
        starts = [n for n, line in enumerate(lines) if line.startswith("$ ") or not shown]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            yield Command(lines[start].removeprefix("$ "), tuple(lines[start + 1 : end]))


COMMANDS = [command for command in commands() if command.text.strip()]
RUN = [command for command in COMMANDS if command.is_run]


@pytest.fixture(scope="module")
def outputs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each command's end; the first that fails is the last."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("bench", "slurm", "ds_configs", "README.md", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended: dict[str, subprocess.CompletedProcess[str]] = {}
    for command in RUN:
        ended[command.text] = subprocess.run(
            ["bash", "-c", command.text],
            cwd=folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if ended[command.text].returncode:
            break
    return ended


def test_every_block_says_what_it_is() -> None:
    assert {language for language, _ in FENCE.findall(README)} <= {"sh", "text", "yaml", "python"}
    assert README.count("```") == 2 * len(FENCE.findall(README))
    assert len(RUN) >= 10
    verbs = {
        shlex.split(command.text, comments=True)[1]
        for command in RUN
        if "shardscale" in command.text
    }
    assert verbs >= {"plan", "export", "import", "generate", "submit", "sweep", "report"}


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.text[:60])
def test_it_runs(command: Command, outputs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    if command.text not in outputs:
        pytest.fail("not reached: a command before it has failed")
    ended = outputs[command.text]
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    for line in command.printed:
        assert any(is_said(line, other) for other in ended.stdout.splitlines()), (
            f"not printed: {line}\n{ended.stdout}"
        )


def is_said(line: str, printed: str) -> bool:
    """Whether a line of the README is a printed one: numbers nearly, measured ones in any size, and
    of a table's row any columns in their order."""
    ours, theirs = fields(line), fields(printed)
    if ours and ours.get("step") == theirs.get("step"):
        return all(is_near(ours[k], theirs.get(k, "")) for k in ours if k not in MEASURED)
    if line.startswith("done: "):
        kept = re.compile(r"test loss \S+ perplexity [\d.]+")
        ours_, theirs_ = (kept.findall(text.replace(",", "")) for text in (line, printed))
        return len(theirs_) == 1 and is_near(ours_[0], theirs_[0])
    if line.startswith("saved "):
        return line.split()[:2] == printed.split()[:2]
    words = iter(printed.split())
    return all(any(is_near(word, other) for other in words) for word in line.split())


def fields(line: str) -> dict[str, str]:
    """`step: 1 of 9  loss: 5.2` as a dictionary, empty for other lines."""
    parts = [part.partition(": ") for part in line.split("  ")]
    return {name: value for name, _, value in parts} if line.startswith("step: ") else {}


def is_near(one: str, other: str) -> bool:
    """The same text, with numbers that differ by less than a tenth.

    The bytes of a traced peak are not the same every time: on a loaded machine FSDP's communication
    frees what it gathered a little later.
    """
    if re.sub(NUMBER, "#", one) != re.sub(NUMBER, "#", other):
        return False
    numbers = [[float(n.replace(",", "")) for n in re.findall(NUMBER, s)] for s in (one, other)]
    return numbers[0] == pytest.approx(numbers[1], rel=0.1)


def test_the_table_of_the_comparison_is_the_reports(
    outputs: dict[str, subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = next(tmp_path_factory.getbasetemp().glob("readme*/sweeps/*/report/report.md"))
    (reported,) = tables(written.read_text(), "tracked live peak")
    (shown,) = tables(README, "tracked live peak")
    by_run = {row["run"]: row for row in reported}
    for row in shown:
        for title, cell in row.items():
            if title != "largest loss difference":  # rounding, of another order on each machine
                assert is_near(cell, by_run[row["run"]][title]), (row["run"], title)


def tables(text: str, title: str) -> Iterator[list[dict[str, str]]]:
    """The Markdown tables that have such a column, as rows."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        if title in rows[0]:
            yield [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if not command.is_run],
    ids=lambda command: command.text[:60],
)
def test_what_is_not_run_would_start(command: Command) -> None:
    """Its flags are taken, for as many ranks as it is for, on GPUs."""
    words = shlex.split(command.text, comments=True)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    if words[0] == "sbatch":
        at = next(n for n, word in enumerate(words) if word.endswith(".sbatch"))
        asked = dict(word.removeprefix("--").split("=") for word in words[1:at])
        subprocess.run(["bash", "-n", words[at]], cwd=ROOT, check=True)
        ranks, flags = int(asked["nodes"]) * int(asked["gpus-per-node"]), words[at + 1 :]
    else:
        assert words[0] == "torchrun"
        own, program, flags = split_command(words[1:])
        assert program == ["-m", "launcher.train"]
        ranks = int(own[own.index("--nproc-per-node") + 1])
    resolve(parse_run_config(flags), world_size=ranks, device_type="cuda")
