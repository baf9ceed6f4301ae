"""Write what `plan --check --json` says as a table of Markdown, for a pull request's comment.

python -m launcher.tools.plan_from.comment checked.json
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.util.errors import ExitCode, UserError, one_line, refusing
from launcher.util.flags import read_small_file
from launcher.util.json_file import parse_json
from launcher.util.sizes import gib

MOST_ROWS: Final = 200
MARK: Final = "<!-- shardscale plan --check -->"
"""Finds the comment again."""
_SIGNS: Final = {"fits": "✅", "tight": "⚠️", "does not fit": "❌", "wrong": "❌"}
_MOST_BYTES: Final = 2**26


@refusing
def main(argv: Sequence[str]) -> int:
    """Print the table of a file; returns an exit code."""
    if len(argv) != 1:
        raise UserError("give one file that `shardscale plan --check --json` has written")
    path = Path(argv[0])
    what = "a file that `plan --check --json` has written"
    text = read_small_file(path, what=what, most_bytes=_MOST_BYTES)
    # parse_json takes objects only, and reads numbers as strictly as everywhere.
    records = parse_json(path, f'{{"all": {text}}}', what=what)["all"]
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise UserError(f"{path}: holds no list of checked configs: give {what}")
    print(table(records), end="")
    return ExitCode.DONE


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table; files and reasons are of strangers, and stand in code."""
    worst_first = sorted(records, key=_share, reverse=True)
    lines = [
        MARK,
        "| config | | at the peak | of memory | why, or what it leaves out |",
        "|---|---|---:|---:|---|",
    ]
    for record in worst_first[:MOST_ROWS]:
        verdict = str(record.get("verdict"))
        used = f"{gib(record['used_bytes'])} | {_share(record):.0%}" if _is_known(record) else " | "
        left = record.get("not_taken_into_account") or []
        more = f"; {len(left)} keys are not planned" if left else ""
        why = code(str(record["reason"])) if "reason" in record else f"{record.get('kind')}{more}"
        sign = _SIGNS.get(verdict, "❔")
        lines.append(f"| {code(str(record.get('file')))} | {sign} {verdict} | {used} | {why} |")
    if len(records) > MOST_ROWS:
        lines.append(f"\n{len(records) - MOST_ROWS} more fit with less.")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Return text of a stranger as code, in which Markdown, HTML and mentions mean nothing."""
    plain = one_line(text, 160).replace("`", "'").replace("|", "¦")
    return f"`{plain}`"


def _is_known(record: Mapping[str, Any]) -> bool:
    return bool(record.get("memory_bytes")) and "used_bytes" in record


def _share(record: Mapping[str, Any]) -> float:
    return record["used_bytes"] / record["memory_bytes"] if _is_known(record) else 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
