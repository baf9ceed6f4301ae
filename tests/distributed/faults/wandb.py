"""In the place of wandb: notes whether a failure is recorded by the time its run is closed."""

from pathlib import Path
from typing import Any


class Settings:
    """Takes whatever is set."""

    def __init__(self, **settings: Any) -> None: ...


class _Run:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: dict[str, Any] = {}

    def log(self, values: dict[str, Any]) -> None: ...

    def finish(self) -> None:
        recorded = (self._folder / "failure.json").exists()
        (self._folder / "closed").write_text(f"failure recorded: {recorded}")


def init(*, dir: str, **options: Any) -> _Run:
    """Open a run that writes beside the folder's own records."""
    return _Run(Path(dir))
