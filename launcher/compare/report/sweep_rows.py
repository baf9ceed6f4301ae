"""What a sweep's files say together: `sweep.json`, and `rows/NAME.json` for each cell that has run.

Tasks of a job array run at the same time on machines that share nothing but a file system. So each
writes the file of its own cell only, whole, and whoever reads puts them together.
"""

import json
from pathlib import Path
from typing import Any

SWEEP_FILE = "sweep.json"
ROWS = "rows"


def read_sweep(path: Path) -> dict[str, Any]:
    """The content of sweep.json, each cell as its own file has it where there is one.

    Raises:
        OSError, ValueError, KeyError, TypeError: a file is missing, damaged, or something else.
    """
    content: dict[str, Any] = json.loads((path / SWEEP_FILE).read_bytes())
    # Listed, not asked for one by one: of a name that was not there a moment ago, NFS says for up
    # to a minute that it still is not.
    known = {file.name: file for file in (path / ROWS).glob("[!.]*.json")}
    content["cells"] = [
        read_row(known[name]) if (name := f"{cell['name']}.json") in known else cell
        for cell in content["cells"]
    ]
    return content


def read_row(file: Path) -> dict[str, Any]:
    """One cell as its own file has it.

    Raises:
        OSError, ValueError: the file is missing or damaged.
    """
    row: dict[str, Any] = json.loads(file.read_bytes())
    return row
