"""Read a config file of another trainer into flat keys, without trusting it."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from launcher.config.yaml_file import parse_yaml
from launcher.tools.plan_from.keys import Flat
from launcher.tools.plan_from.shell import LAUNCHERS, flags_of_shell
from launcher.util.errors import WHY, UserError, refused
from launcher.util.flags import MOST_FILE_BYTES, read_small_file
from launcher.util.json_file import parse_json

WHAT: Final = "a config of a trainer: YAML, JSON, TOML, or a command line in a .sh file"
SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml", ".sh")
_FORMATS: Final = {
    **dict.fromkeys((".json", ".conf"), "JSON"),  # some give DeepSpeed's the latter
    ".toml": "TOML",
    **dict.fromkeys((".sh", ".bash", ".txt"), "shell"),
}
MOST_KEYS: Final = 5000
MOST_LEVELS: Final = 20


class Source(NamedTuple):
    """A file: its name, its text, and its keys."""

    path: Path
    text: str
    flat: Flat
    format: str = "YAML"
    over: Flat = MappingProxyType({})
    """Keys of a command line that names the file, which win."""

    def under(self, over: Flat) -> "Source":
        """Return the file as a command line with these flags has it."""
        return self._replace(flat={**self.flat, **over}, over=over)


def read_source(path: Path) -> Source:
    """Read a file.

    Raises:
        UserError: missing, too large, nested too deep, or not what its name says.
    """
    return source_of(path, read_small_file(path, what=WHAT, most_bytes=MOST_FILE_BYTES))


def source_of(path: Path, text: str) -> Source:
    """Parse a file's text, by the end of its name.

    Raises:
        UserError: it is not what its name says.
    """
    format_ = _FORMATS.get(path.suffix.lower(), "YAML")
    content: Any
    if format_ == "JSON":
        content = parse_json(path, text, what=WHAT, infinite=True)
    elif format_ == "TOML":
        with (
            refused(RecursionError, f"{path}: not valid TOML, it is nested too deep"),
            refused(ValueError, f"{path}: not valid TOML, correct it: {WHY}"),
        ):
            content = tomllib.loads(text)
    elif path.suffix.lower() == ".py":
        raise UserError(
            f"{path}: is a program: give its config, or rehearse it: shardscale rehearse --gpu "
            f"NAME -- python {path}"
        )
    elif format_ == "shell":
        content = flags_of_shell(text)
        if content is None:
            raise UserError(
                f"{path}: no line starts {', '.join(LAUNCHERS)} with flags: give {WHAT}, or plan "
                "the run by flags, without --from"
            )
    else:
        content = parse_yaml(path, text, repeats=True)  # which their trainers take
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {content!r:.40}, but must hold keys: give {WHAT}")
    flat: dict[str, Any] = {}
    for key, value in _flatten(content, path):
        flat[key] = value
        if len(flat) > MOST_KEYS:
            raise UserError(f"{path}: has more than {MOST_KEYS:,} keys: give {WHAT}")
    return Source(path, text, flat, format_)


def _flatten(content: dict[Any, Any], path: Path, place: str = "") -> Iterator[tuple[str, Any]]:
    if place.count(".") >= MOST_LEVELS:
        raise UserError(f"{path}: nested too deep ({MOST_LEVELS} levels at most)")
    for key, value in content.items():
        name = f"{place}{str(key)[:100]}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, path, f"{name}.")
        else:
            yield name, value
