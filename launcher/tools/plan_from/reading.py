"""Read a config file of another trainer into flat keys, without trusting it."""

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.config.yaml_file import parse_yaml
from launcher.tools.plan_from.keys import Flat
from launcher.util.errors import UserError
from launcher.util.flags import MOST_FILE_BYTES, read_small_file
from launcher.util.json_file import parse_json

WHAT: Final = "a config of a trainer: YAML, JSON, TOML, or a command line in a .sh file"
SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml", ".sh")
MOST_KEYS: Final = 5000
MOST_LEVELS: Final = 20
_LAUNCHERS: Final = (
    *("accelerate", "torchrun", "deepspeed", "python", "python3", "llamafactory-cli", "axolotl"),
    *("trl", "litgpt"),
)
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPERATORS: Final = ("|", "||", "&", "&&", ";", "|&")
_REDIRECTION: Final = re.compile(r"(?<!\S)(?:\d|&)?>>?(?:&\d|[ \t]*\S+)")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::?-([^${}]*))?\}|(\w+))")


class Source(NamedTuple):
    """A file: its name, its text, and its keys."""

    path: Path
    text: str
    flat: Flat


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
    suffix = path.suffix.lower()
    content: Any
    if suffix == ".json":
        content = parse_json(path, text, what=WHAT, infinite=True)
    elif suffix == ".toml":
        content = _toml(path, text)
    elif suffix in (".sh", ".bash", ".txt"):
        content = _command_line(path, text)
    else:
        content = parse_yaml(path, text)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {content!r:.40}, but must hold keys: give {WHAT}")
    flat: dict[str, Any] = {}
    for key, value in _flatten(content, path):
        flat[key] = value
        if len(flat) > MOST_KEYS:
            raise UserError(f"{path}: has more than {MOST_KEYS:,} keys: give {WHAT}")
    return Source(path, text, flat)


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{path}: not valid TOML, it is nested too deep") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML, correct it: {error}") from None


def _flatten(content: dict[Any, Any], path: Path, place: str = "") -> Iterator[tuple[str, Any]]:
    if place.count(".") >= MOST_LEVELS:
        raise UserError(f"{path}: nested too deep ({MOST_LEVELS} levels at most)")
    for key, value in content.items():
        name = f"{place}{str(key)[:100]}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, path, f"{name}.")
        else:
            yield name, value


def _command_line(path: Path, text: str) -> dict[str, Any]:
    """Read the flags of the last command that starts a training."""
    joined = _REDIRECTION.sub(" ", re.sub(r"\\\r?\n", " ", text))
    commands = []
    variables: dict[str, str] = {}
    for line in joined.splitlines():
        try:
            tokens = [_substituted(token, variables) for token in shlex.split(line, comments=True)]
        except ValueError:
            continue  # a quote over several lines is no command of ours
        assigned = [_ASSIGNMENT.fullmatch(token) for token in tokens if token != "export"]
        # only those in front of a command, where NAME=VALUE is no argument of it
        variables |= {found[1]: found[2] for found in itertools.takewhile(bool, assigned) if found}
        for is_operator, group in itertools.groupby(tokens, _OPERATORS.__contains__):
            command = [] if is_operator else list(group)
            start = next((n for n, t in enumerate(command) if Path(t).name in _LAUNCHERS), None)
            if start is not None and any(token.startswith("--") for token in command):
                commands.append(command[start:])
    if not commands:
        raise UserError(f"{path}: has no line that starts a training with flags: give {WHAT}")
    # earlier ones prepare data or a model
    return flags_of(commands[-1])


def _substituted(token: str, variables: Mapping[str, str]) -> str:
    """Replace the shell variables that have a value here, or a default."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name) or (found[0] if default is None else default)

    return _VARIABLE.sub(value, token)


def flags_of(tokens: list[str]) -> dict[str, Any]:
    """Return `--a-b 1 --c` as `{"a_b": "1", "c": True}`."""
    found: dict[str, Any] = {}
    left = list(tokens)
    while left:
        token = left.pop(0)
        if not token.startswith("--"):
            continue
        name, has_value, value = token[2:].partition("=")
        values = [value] if has_value else []
        while not has_value and left and _is_value(left[0]):
            values.append(left.pop(0))
        one: Any = True if not values else values[0] if len(values) == 1 else values
        found[name.replace("-", "_")] = one
    return found


def _is_value(token: str) -> bool:
    """Return whether a token belongs to the flag before it, and is no flag or program."""
    return not re.match(r"-+[A-Za-z]", token) and not token.endswith(".py")
