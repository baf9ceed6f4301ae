"""Every command of the README and of docs/tour.md is run as it stands, in order, in one folder, and
prints what the page says. What needs GPUs, a network or long says so there, and is checked by
tests/unit/house/test_docs.py."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_commands import DOCS, README, ROOT, Block, Command, blocks_of

TOUR = DOCS / "tour.md"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
MEASURED = ("memory", "tps", "slow", "elapsed", "left")
"""Of a step's line: another machine has others."""


def run_blocks() -> Iterator[tuple[Path, str, Block]]:
    """The blocks of commands that are run, with names; the tour begins as the README does."""
    before: set[tuple[Command, ...]] = set()
    for page in (README, TOUR):
        for number, block in enumerate(blocks_of(page.read_text(encoding="utf-8"))):
            if any(each.is_run for each in block.commands) and block.commands not in before:
                yield page, f"{page.stem}-{number}", block
                before.add(block.commands)


BLOCKS = list(run_blocks())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each block has printed; the first that fails is the last."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folder = tmp_path_factory.mktemp("readme")
    for name in ("bench", "slurm", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    printed: dict[str, str] = {}
    for _, name, block in BLOCKS:
        done = subprocess.run(
            ["bash", "-ec", "\n".join(each.text for each in block.commands if each.is_run)],
            cwd=folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        if done.returncode:
            printed[name] = f"failed: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            break
        printed[name] = done.stdout
    return printed


def test_the_tour_shows_every_way_in_and_out() -> None:
    text = "\n".join(each.text for *_, block in BLOCKS for each in block.commands)
    for verb in ("plan", "export", "import", "generate", "sweep", "report"):
        assert f"shardscale {verb} " in text


@pytest.mark.parametrize(("page", "name", "block"), BLOCKS, ids=[name for _, name, _ in BLOCKS])
def test_it_runs(page: Path, name: str, block: Block, outputs: dict[str, str]) -> None:
    printed = outputs.get(name, "failed: a block before it has failed")
    assert not printed.startswith("failed: "), printed
    start, end = block.output or (0, 0)
    for line in page.read_text(encoding="utf-8")[start:end].splitlines():
        assert any(is_said(line, other) for other in printed.splitlines()), (
            f"not printed: {line}\n{printed}"
        )


def test_what_is_shown_of_a_rehearsal_is_what_its_page_shows() -> None:
    """It needs torch's CUDA build, so its output was recorded there."""
    text = README.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(does not fit on .*?)^```$", text, re.MULTILINE | re.DOTALL)
    recorded = (DOCS / "rehearse.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in shown.splitlines() if line not in recorded] == []


def is_said(line: str, printed: str) -> bool:
    """Return whether a line of a page is a printed one: numbers nearly, measured ones in any size,
    and of a table's row any columns in their order."""
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
    outputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert outputs
    written = next(tmp_path_factory.getbasetemp().glob("readme*/sweeps/*/report/report.md"))
    (reported,) = tables(written.read_text(), "tracked live peak")
    (shown,) = tables(TOUR.read_text(encoding="utf-8"), "tracked live peak")
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
