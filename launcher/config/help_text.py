"""`--help` of the training, in tiers: a first screen, a group or `all`, one flag in full."""

import ast
import functools
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from launcher.config.help_lines import ABOUT, FIRST, LINES
from launcher.config.schema import RunConfig, field_types
from launcher.util.errors import UserError
from launcher.util.flags import flag

WIDTH: Final = 80
_COLUMN: Final = 29
_ALL: Final = "all"
_TEXTS: Final = {name: text for lines in LINES.values() for name, text in lines.items()}
_SOURCES: Final = ("config/schema.py", "config/model.py", "config/sharding.py", "optim/choice.py")


def help_text(topic: str | None) -> str:
    """Return the first screen, or the help of a group, of `all`, or of a flag.

    Raises:
        UserError: there is no such topic.
    """
    if topic is None:
        return "\n".join(_first_screen())
    if topic == _ALL:
        return "\n".join(line for group in LINES for line in (*_group(group), ""))
    if topic in LINES:
        same = f"; --help --{topic} the flag of this name" if topic in field_types() else ""
        return "\n".join([*_group(topic), "", f"--help FLAG explains one in full{same}."])
    name = topic.lstrip("-").replace("-", "_")
    name = name if name in field_types() else name.removeprefix("no_")
    if name in field_types():
        return "\n".join(_in_full(name))
    raise UserError(
        f"--help {topic!r:.40}: give one of {', '.join(LINES)}, {_ALL}, or the name of a flag"
    )


def _first_screen() -> Iterator[str]:
    yield "usage: torchrun --nproc N -m launcher.train [flags]      (N GPUs of this node)"
    yield "       shardscale train [flags]                          (one GPU, or the CPU)"
    yield ""
    yield "Train a decoder. Flags to start with, and their defaults:"
    yield ""
    yield from map(_line, FIRST)
    yield ""
    yield "All flags, by group:"
    yield ""
    for group, about in ABOUT.items():
        yield f"  --help {group:12} {len(LINES[group]):3}  {about}"
    yield f"  --help {_ALL:12} {len(field_types()):3}  one line for each"
    yield "  --help FLAG              one flag in full, as in --help micro-batch"
    yield ""
    yield "--config FILE.yaml reads the same names from a file; flags win over it."
    yield "shardscale plan, with the same flags, predicts what fits; shardscale recipe"
    yield "lists files to begin with."


def _group(group: str) -> Iterator[str]:
    yield f"{group}: {ABOUT[group]}"
    yield from map(_line, LINES[group])


def _line(name: str) -> str:
    default = RunConfig().flat().get(name)
    spelled = flag(f"no_{name}" if default is True else name)
    shown = default if isinstance(default, list) else [default]
    text = _TEXTS[name]
    if default is not None and not isinstance(default, bool):
        text += f" [{' '.join(map(str, shown))}]"
    return f"  {spelled:{_COLUMN - 3}} {text}"


def _in_full(name: str) -> Iterator[str]:
    yield _line(name).strip()
    if values := choices(name):
        yield from textwrap.wrap(f"values: {', '.join(values)}", WIDTH)
    yield ""
    yield from textwrap.wrap(_docstrings()[name], WIDTH)


def choices(name: str) -> list[str]:
    """Return the values of a field with a fixed set of them; [] for any other."""
    kind = field_types()[name]
    members = (kind, *typing.get_args(kind))
    if bool in members[1:]:
        return ["auto", "on", "off"]
    fixed = next((each for each in members if typing.get_origin(each) is Literal), None)
    return [str(value) for value in typing.get_args(fixed)]


@functools.cache
def _docstrings() -> dict[str, str]:
    """Return field -> the string below it, which Python itself does not keep."""
    root = Path(__file__).parents[1]
    found = {}
    for source in _SOURCES:
        tree = ast.parse((root / source).read_text(encoding="utf-8"))
        for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for field, below in zip(section.body, section.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = _constant(below)
                    if text is not None:
                        found[field.target.id] = " ".join(text.split())
    return found


def _constant(node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return str(value.value) if isinstance(value, ast.Constant) else None


def topic_of(argv: Sequence[str], asked: Sequence[str]) -> str | None:
    """Return the word behind the flag of `asked`, if any; a flag only where it is the last word."""
    at = next(n for n, token in enumerate(argv) if token.partition("=")[0] in asked)
    word = argv[at].partition("=")[2] or next(iter(argv[at + 1 :]), "")
    ends = at + 2 >= len(argv)
    return word if word and (ends or not word.startswith("-")) else None
