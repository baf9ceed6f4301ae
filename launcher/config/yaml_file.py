"""Strict YAML: plain values, unique keys, and nothing that takes minutes to read."""

import re
from pathlib import Path
from typing import Any

import yaml

from launcher.util.errors import WHY, UserError, refused
from launcher.util.flags import read_small_file

_TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    _TAG + "int": re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    # 1e-3, without a point, stays text, which a field's type reads as a number
    _TAG + "float": re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates, base-60 and octal numbers (`1:30` would be 90, and 010 8), without
    aliases, and with unique keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, _NUMBERS.get(tag, pattern))
            for tag, pattern in resolvers
            if tag != _TAG + "timestamp"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor}: write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice, leave one out", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Repeating(_Loader):
    """Takes the last of several values of a key, as PyYAML does."""

    construct_mapping = yaml.SafeLoader.construct_mapping


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; an empty file is an empty mapping.

    Raises:
        UserError: no file to read, or not YAML.
    """
    return parse_yaml(path, read_small_file(path, what="a YAML file"))


def parse_yaml(path: Path, text: str, *, repeats: bool = False) -> Any:
    """Return the content of the text of a YAML file; `path` names it in refusals.

    Args:
        repeats: a key may be given several times.

    Raises:
        UserError: not YAML.
    """
    try:
        with (
            refused(RecursionError, f"{path}: not valid YAML, it is nested too deep"),
            # a number of too many digits
            refused(ValueError, f"{path}: not valid YAML, correct it: {WHY}"),
        ):
            content = yaml.load(text, Loader=_Repeating if repeats else _Loader)
    except yaml.YAMLError as error:
        where = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise UserError(f"{path}: not valid YAML, correct it: {where}") from None
    return {} if content is None else content
