"""The planner as files that a browser's Python can load: our own modules, less what needs torch."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import launcher
from launcher.strategies import STRATEGIES
from launcher.tools.site.inside.stored import DATA

_ROOT: Final = Path(launcher.__file__).parent
_SUBSTITUTES: Final = {
    "launcher/forecast/trace/micro_batches.py": "launcher/tools/site/inside/micro_batches.py",
    "launcher/strategies/shapes.py": "launcher/tools/site/inside/shapes.py",
}
"""A module -> what stands in its place."""
_LEFT_OUT: Final = (
    *("checkpoint", "compare", "forecast/trace/record", "run", "util/page/assets"),
    *("tools/completion", "tools/doctor", "tools/exchange", "tools/generate", "tools/prune"),
    *("tools/serve", "tools/submit"),
    *(
        f"tools/site/{name}"
        for name in ("assets", "build", "bundle", "generate", "recorded", "runtime", "site_cli")
    ),
)


def planner_files() -> dict[str, bytes]:
    """Name -> content, to be laid into a folder on Python's path.

    Beside the modules: the stored traces, and the versions of libraries that predictions follow.
    """
    found = {f"launcher/{name}": _ROOT / name for name in sorted(_sources(_ROOT))}
    found |= {name: _ROOT.parent / other for name, other in _SUBSTITUTES.items()}
    files = {name: path.read_bytes() for name, path in found.items()}
    files[f"launcher/{DATA.relative_to(_ROOT)}"] = DATA.read_bytes()
    for library in sorted({name for each in STRATEGIES.values() for name in each.follows}):
        version = metadata.version(library)
        text = f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n"
        files[f"{library}-{version}.dist-info/METADATA"] = text.encode()
    return files


def _sources(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():  # a link among them, which rglob would not follow
        name = str(path.relative_to(_ROOT))
        if name.startswith(_LEFT_OUT) or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield name
