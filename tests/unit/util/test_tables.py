"""What is shown fits the terminal and the figure: columns, units, durations."""

import os
import pty
import re
import select
import subprocess
import sys
import termios

import pytest

from launcher.util.sizes import duration, gib, parse_bytes
from launcher.util.tables import GAP, MUST, SHY, Column, fitting

COLUMNS = [
    Column(title="sharding", rank=MUST),
    Column(title="s/step", rank=2, right=True),
    Column(title=f"micro{SHY}batch", rank=1, right=True),
    Column(title="verdict", rank=MUST),
    Column(title="highest in", rank=3),
]
ROWS = [
    ["zero3+cpu+param", "0.456", "128", "does not fit", "forward of steady: 47% is temporary"],
    ["ddp", "12.3", "1", "fits", "step"],
]
WIDTHS = [15, 6, 6, 12, 35]


def printed_on_terminal(code: str, width: int) -> str:
    """Return what a Python program shows on a terminal of that many columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, width))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.STDOUT,
        env=environment | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("width", range(10, 120))
def test_columns_are_whole_or_left_out(width: int) -> None:
    kept = fitting(COLUMNS, ROWS, width)
    assert {0, 3} <= set(kept)
    taken = sum(WIDTHS[n] + GAP for n in kept) - GAP
    assert taken <= width or kept == [0, 3]
    # The highest rank goes first, and a column is not left out while there is room for it.
    ranks = [COLUMNS[n].rank for n in kept]
    for n in set(range(len(COLUMNS))) - set(kept):
        before = sum(WIDTHS[m] + GAP for m in kept if COLUMNS[m].rank < COLUMNS[n].rank)
        assert before + WIDTHS[n] > width or COLUMNS[n].rank > max(ranks)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_cut_on_a_terminal(width: int) -> None:
    code = (
        "from tests_columns import COLUMNS, ROWS\n"
        "from launcher.util.tables import print_table\n"
        "print_table(COLUMNS, ROWS, otherwise='--json has them all')"
    ).replace("tests_columns", "unit.util.test_tables")
    shown = printed_on_terminal(f"import sys; sys.path.insert(0, 'tests')\n{code}", width)
    flat = "".join(shown.split())
    for n in fitting(COLUMNS, ROWS, width):
        assert all(row[n].replace(" ", "") in flat for row in ROWS)
    left_out = [c.name for n, c in enumerate(COLUMNS) if n not in fitting(COLUMNS, ROWS, width)]
    assert "\u2026" not in shown
    said = " ".join(shown.split())
    assert f"not shown in {width} columns: {', '.join(left_out)}" in said or not left_out
    assert ("--json has them all" in said) == bool(left_out)


def test_a_file_gets_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from launcher.util.tables import print_table

    print_table(COLUMNS, ROWS, otherwise="")
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].split("  ")[0] == "zero3+cpu+param"
    assert shown[-2].endswith("47% is temporary")
    assert shown[-1].split() == ["ddp", "12.3", "1", "fits", "step"]


def test_units_fit_the_size() -> None:
    sizes = {0: "0", 1: "1B", 5000: "4.9KiB", 3 << 19: "1.5MiB", 2**30 - 1: "1.00GiB"}
    sizes |= {2**30: "1.00GiB", 1000 << 20: "1000.0MiB", 59604 << 30: "59604.00GiB"}
    sizes |= {-(3 << 20): "-3.0MiB"}
    assert {size: gib(size) for size in sizes} == sizes
    assert gib(None) == "n/a"
    # Whatever is shown can be given back, and is what it was to the last digit shown.
    for exponent in range(11, 50):
        for size in (2**exponent - 1, 2**exponent, 3 * 2**exponent // 2):
            text = gib(size)
            assert abs(parse_bytes(text, "--memory-limit") / size - 1) < 0.05
            assert not re.match(r"0\.0+[A-Z]", text)


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 89, 90, 5399, 9000)] == [
        *("0 s", "89 s", "2 min", "90 min", "2.5 h"),
    ]
