"""Read the command line that starts a training from a shell script, without running it."""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.util.flags import MOST_FILE_BYTES

_TRAINERS: Final = ("accelerate", "torchrun", "deepspeed", "llamafactory-cli", "axolotl", "trl")
_TAKE_ALL: Final = ("accelerate", "deepspeed", "llamafactory-cli", "axolotl")
LAUNCHERS: Final = (*_TRAINERS, "litgpt", "python", "python3")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY: Final = re.compile(r"(?m)^([ \t]*(?:export[ \t]+)?\w+)=\(([^()]*)\)")
_OPERATORS: Final = ("|", "||", "&", "&&", ";", "|&")
_REDIRECTION: Final = re.compile(r"(?<!\S)(?:\d|&)?>>?(?:&\d|[ \t]*\S+)")
_PRINTED: Final = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`\n]*`")
_VARIABLE: Final = re.compile(
    r'"?\$\{(?P<array>\w+)\[[@*]\]\}"?|\$(?:\{(?P<name>\w+)(?::?-(?P<default>[^${}]*))?\}|(\w+))'
)
_MOST_LINES: Final = 40
"""Lines that a quoted text spans."""
_CONFIGS: Final = (".yaml", ".yml", ".json", ".toml")


def flags_of_shell(text: str) -> dict[str, Any] | None:
    """Return the flags of the command that starts a training: the last of those with the most
    flags, since others prepare or evaluate; None without one."""
    text = re.sub(r"\\\r?\n", " ", text)
    for _ in range(2):  # what a command prints, also within another one
        text = _PRINTED.sub("$(...)", text)
    text = _ARRAY.sub(lambda found: f"{found[1]}={shlex.quote(_without_comments(found[2]))}", text)
    commands: list[dict[str, Any]] = []
    variables = _Variables()
    for line in _whole_lines(_REDIRECTION.sub(" ", text)):
        tokens = _split(variables.substituted(line)) or _split(line) or []
        assigned = [_ASSIGNMENT.fullmatch(token) for token in tokens if token != "export"]
        # only those in front of a command, where NAME=VALUE is no argument of it
        for found in itertools.takewhile(bool, assigned):
            if found is None or found[2] == "$(...)":
                continue
            # `model=$2` may take the place of a default
            if not re.fullmatch(r"\$\{?\d\}?", found[2]) or found[1] not in variables:
                variables[found[1]] = found[2]
        for is_operator, group in itertools.groupby(tokens, _OPERATORS.__contains__):
            command = [] if is_operator else list(group)
            start = next((n for n, t in enumerate(command) if Path(t).name in LAUNCHERS), None)
            if start is None:
                continue
            flags = flags_of(command[start:])
            by_name = any(token.startswith("--") for token in command[start:])
            trains = Path(command[start]).name in _TRAINERS or "-m" in command
            if by_name or ("config" in flags and trains):
                commands.append(_on_devices(flags, command[start], variables))
    return max(reversed(commands), key=len, default=None)


def _on_devices(
    flags: dict[str, Any], launcher: str, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Add the devices of the environment, where a launcher takes these."""
    if launcher.endswith("llamafactory-cli"):  # src/llamafactory/launcher.py
        names = ("NNODES", "NPROC_PER_NODE")
        flags = {name.lower(): variables[name] for name in names if name in variables} | flags
    devices = variables.get("CUDA_VISIBLE_DEVICES", "")
    said = {"num_gpus", "num_processes", "nproc_per_node", "include"} & flags.keys()
    if launcher.endswith(_TAKE_ALL) and not said and re.fullmatch(r"\d+(?:,\d+)*", devices):
        return {**flags, "num_gpus": str(devices.count(",") + 1)}
    return flags


def _whole_lines(text: str) -> Iterator[str]:
    """Yield lines; a quoted text that spans several is one."""
    lines, begin = text.splitlines(), 0
    while begin < len(lines):
        for end in range(begin + 1, min(begin + _MOST_LINES, len(lines)) + 1):
            one = "\n".join(lines[begin:end])
            if _split(one) is not None:
                yield one
                break
        else:
            end = begin + 1  # a quote that nothing closes
        begin = end


def _split(line: str) -> list[str] | None:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None


def _without_comments(lines: str) -> str:
    return " ".join(line for line in lines.splitlines() if not line.lstrip().startswith("#"))


class _Variables(dict[str, str]):
    """Variables of a shell by name; `left` bounds the text that they take the place of, since the
    values of values would fill the memory."""

    left = MOST_FILE_BYTES

    def substituted(self, line: str) -> str:
        """Replace the variables that have a value here, or a default."""
        return _VARIABLE.sub(self._value, line)

    def _value(self, found: re.Match[str]) -> str:
        name, default = found["array"] or found["name"] or found[4], found["default"]
        text = self.get(name) or (found[0] if default is None else default)
        self.left -= len(text)
        return text if self.left >= 0 else found[0]


def flags_of(tokens: list[str]) -> dict[str, Any]:
    """Return `--a-b 1 --c d=2 x.yaml` as a_b "1", c True, d "2", config "x.yaml"."""
    found: dict[str, Any] = {}
    left = list(tokens)
    while left:
        token = left.pop(0)
        if not token.startswith("--"):
            if token.startswith("$"):  # arguments that only the shell knows
                found[token] = True
            elif token.endswith(_CONFIGS):
                found.setdefault("config", token)
            elif override := re.fullmatch(r"([a-z][\w.]*)=(.*)", token):
                found[override[1]] = override[2]
            continue
        name, has_value, value = token[2:].partition("=")
        values = [value] if has_value else []
        while not has_value and left and _is_value(left[0], values):
            values.append(left.pop(0))
        one: Any = True if not values else values[0] if len(values) == 1 else values
        found[name.replace("-", "_")] = one
    return found


def _is_value(token: str, values: list[str]) -> bool:
    """Return whether a token belongs to the flag before it, and is no flag, program or override."""
    if values and re.match(r"\$|[a-z]\w*=", token):
        return False
    return not re.match(r"-+[A-Za-z]", token) and not token.endswith(".py")
