"""The planner against runs that others have measured and published.

    python bench/published.py [--only TEXT...] [--seconds-only] [--output bench/results]

Each row of `published_rows.py` is planned as another trainer's run, without a GPU. Writes
published.json, published.md and published.png, and the same tables with what explains the misses
to docs/accuracy.md. Constants of seconds are fitted to some rows by `published_fit.py`; the others
check. `--only` plans the rows whose key contains one of the texts anew and keeps the results of the
others, `--seconds-only` keeps all bytes, which take most of half an hour.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from published_plan import Planned, planned, planned_seconds
from published_rows import Row, published_rows
from published_tables import accuracy_page, markdown, plot

from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="texts in the keys of rows")
    parser.add_argument("--seconds-only", action="store_true", help="keep the bytes there are")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = known_results(options.output / "published.json")
    rows = published_rows()
    chosen = [row for row in rows if any(text in row.key for text in options.only)]
    started_s = time.monotonic()
    for number, row in enumerate(chosen, 1):
        if options.seconds_only:
            known[row.key] = planned_seconds(row, known[row.key])
        else:
            known[row.key] = planned(row)
        spent_s = time.monotonic() - started_s
        left_s = spent_s / number * (len(chosen) - number)
        print(f"[{number}/{len(chosen)}] {row.key} (about {left_s:.0f} s to go)", file=sys.stderr)
    results = [(row, known[row.key]) for row in rows if row.key in known]
    write(results, options.output)


def known_results(path: Path) -> dict[str, Planned]:
    """Return the results of an earlier run, by key."""
    if not path.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    names = Planned.__dataclass_fields__
    return {row["key"]: Planned(**{name: row[name] for name in names}) for row in rows}


def write(results: list[tuple[Row, Planned]], folder: Path) -> None:
    """All of it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "range": [LEAST_OF_PREDICTED, MOST_OF_PREDICTED],
        "rows": [{**row.as_dict(), **plan.as_dict()} for row, plan in results],
    }
    text = json.dumps(content, indent=1) + "\n"
    (folder / "published.json").write_text(text, encoding="utf-8")
    (folder / "published.md").write_text(markdown(results), encoding="utf-8")
    plot(results, folder / "published.png")
    if folder == RESULTS:
        PAGE.write_text(accuracy_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
