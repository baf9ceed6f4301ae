"""Run parts of a plan one after the other, within a time limit, and keep each result at once.

Only the standard library: it starts before anything is installed. Whatever ends it (SIGINT,
SIGTERM, SIGHUP, the time), the running part's processes end with it, finished parts have their
results on disk, and the same command continues behind them.
"""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from processes import Outcome, Stop, adopt_orphans, run_command

ROOT = Path(__file__).parents[2]
LAST_LINES = {"done": 5, "failed": 40}
MOST_FIGURES_BYTES = 2**20  # of one JSON file that a part writes


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One command. In `words`, `{out}` is its own folder and `{python}` this interpreter.

    JSON files that the command writes into its folder become the part's figures.
    """

    section: str
    name: str
    words: tuple[str, ...]
    budget_s: int

    @property
    def label(self) -> str:
        return f"{self.section}/{self.name}"


class Results:
    """Results of parts: `<section>.json` with a record per part, the newest where folders differ.

    A record counts for the GPU, the code and the command that it was made with.
    """

    def __init__(
        self,
        machine: Mapping[str, Any],
        code: Mapping[str, Any],
        *,
        read: Sequence[Path],
        written: Sequence[Path],
    ) -> None:
        self.machine, self.code = machine, code
        self.written = written
        self.records: dict[str, dict[str, Any]] = {}
        found = [record for folder in read for record in read_records(folder)]
        for record in sorted(found, key=lambda r: str(r["finished"])):
            self.records[record["part"]] = record

    def of(self, part: Part) -> dict[str, Any] | None:
        record = self.records.get(part.label)
        if record is None or record["command"] != list(part.words):
            return None
        same_gpu = record["machine"]["name"] == self.machine["name"]
        same_code = record["code"]["sources"] == self.code["sources"]
        return record if same_gpu and same_code else None

    def keep(self, part: Part, outcome: Outcome, folder: Path) -> None:
        """Write the part's section anew; a reader sees the old file or the new one."""
        self.records[part.label] = {
            "part": part.label,
            "state": outcome.state,
            "why": outcome.why,
            "exit_code": outcome.exit_code,
            "duration_s": round(outcome.duration_s, 1),
            "budget_s": part.budget_s,
            "command": list(part.words),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": dict(self.machine),
            "code": dict(self.code),
            "figures": figures_of(folder),
            "last_lines": last_lines(folder / "log.txt", LAST_LINES[outcome.state]),
        }
        prefix = f"{part.section}/"
        section = [r for label, r in self.records.items() if label.startswith(prefix)]
        for target in self.written:
            write_atomically(target / f"{part.section}.json", json.dumps(section, indent=1) + "\n")


def read_records(folder: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            for record in found:
                assert {"part", "finished", "machine", "code", "command"} <= record.keys()
        except (ValueError, TypeError, AttributeError, AssertionError):
            refuse(f"{path} is not a file of the plan's results: move it away")
        yield from found


def refuse(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(2)


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def figures_of(folder: Path) -> dict[str, Any]:
    """Contents of the part's JSON files by name, also where it failed behind them."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.stat().st_size <= MOST_FIGURES_BYTES:
            with contextlib.suppress(ValueError):  # ended while it wrote
                found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def last_lines(log: Path, count: int) -> list[str]:
    """The end of what a part printed, wherever the checkout is; bars that redraw a line count by
    their last state."""
    text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    text = text.replace(f"{ROOT}/", "")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def run_plan(
    parts: Sequence[Part],
    results: Results,
    work: Path,
    *,
    environment: Mapping[str, str],
    ends_s: float,
    patience: float,
    again: bool,
    stop: Stop,
    kept: Callable[[], None],
) -> int:
    """Run the parts that have no result yet, in order; returns how many have failed.

    Args:
        ends_s: when the plan's time is over, on the monotonic clock.
        patience: limit of a part over its budget.
        again: run parts that have a result, too.
        kept: called after each result that is written.
    """
    adopt_orphans()
    budgets_s, spent_s, failed = 0.0, 0.0, 0
    for number, part in enumerate(parts, start=1):
        head = f"[{number}/{len(parts)}] {part.label}"
        if not again and (record := results.of(part)):
            failed += record["state"] == "failed"
            say(f"{head}: {record['state']} before ({record['finished']})")
            continue
        if stop.heard or time.monotonic() >= ends_s:
            left = [p for p in parts[number - 1 :] if again or not results.of(p)]
            say(f"{len(left)} of {len(parts)} parts left: the same command continues")
            break
        folder = work / part.section / part.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = run_command(
            words_of(part, folder),
            folder / "log.txt",
            folder=ROOT,
            environment=environment,
            limit_s=patience * part.budget_s,
            plan_ends_s=ends_s,
            stop=stop,
        )
        if outcome.state != "cut":
            results.keep(part, outcome, folder)
            kept()
        failed += outcome.state == "failed"
        budgets_s, spent_s = budgets_s + part.budget_s, spent_s + outcome.duration_s
        left = [p for p in parts[number:] if again or not results.of(p)]
        to_go_s = sum(p.budget_s for p in left) * spent_s / budgets_s
        why = f" ({outcome.why})" if outcome.why else ""
        say(
            f"{head}: {outcome.state}{why} in {outcome.duration_s:.0f} s; about {to_go_s:.0f} s "
            f"to go, {max(0.0, ends_s - time.monotonic()):.0f} s left"
        )
        if outcome.state != "done":
            for line in last_lines(folder / "log.txt", 5):
                say(f"    {line}")
    return failed


def say(line: str) -> None:
    print(line, flush=True)


def words_of(part: Part, folder: Path) -> list[str]:
    return [w.replace("{out}", str(folder)).replace("{python}", sys.executable) for w in part.words]
