"""Change keys of a config in its text, so that comments and order stay."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from launcher.tools.plan_from.reading import Source
from launcher.util.errors import UserError, refused


def edited(source: Source, changes: Mapping[str, Any]) -> str:
    """Return the text with keys changed or added.

    Raises:
        UserError: a value spans what cannot be replaced.
    """
    text = source.text
    for key, value in changes.items():
        if source.format == "TOML":
            text = _in_toml(text, key, value)
        elif source.format == "shell":
            text = _in_command(text, key, value, source)
        else:
            text = _in_tree(text, key, value, source.format)
    return text


def said(key: str, value: Any, format_: str) -> str:
    """Spell a change as the file does."""
    if format_ == "shell":
        return _option(key, value)
    return f"{key}{' =' if format_ == 'TOML' else ':'} {_literal(value, format_)}"


def _option(key: str, value: Any) -> str:
    return f"--{key} {shlex.quote(str(value))}"


def _literal(value: Any, format_: str) -> str:
    if format_ != "YAML" or not isinstance(value, str):
        return json.dumps(value)
    return value if re.fullmatch(r"[A-Za-z][\w.-]*( [\w.-]+)*", value) else json.dumps(value)


def _in_tree(text: str, key: str, value: Any, format_: str) -> str:
    """Edit YAML or JSON, whose places a YAML parser knows."""
    with refused(yaml.YAMLError):
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, yaml.MappingNode):
            raise UserError(key)
        inner = next((v for k, v in node.value if k.value == part), None)
        if inner is None:
            return _added(text, node, parts[depth:], value, format_)
        is_last = depth == len(parts) - 1
        if isinstance(inner, yaml.ScalarNode) and (is_last or inner.value in ("", "null", "~")):
            begin, end = inner.start_mark.index, inner.end_mark.index
            new = _nested(parts[depth + 1 :], value, format_)
            # `key:` without a value has no space to write behind
            return text[:begin] + (" " if begin == end else "") + new + text[end:]
        if is_last and isinstance(inner, yaml.SequenceNode) and isinstance(value, list):
            return _appended(text, inner, value[0], format_)
        node = inner
    raise UserError(key)


def _nested(parts: list[str], value: Any, format_: str) -> str:
    literal = _literal(value, format_)
    for part in reversed(parts):
        literal = f"{{{json.dumps(part) if format_ == 'JSON' else part}: {literal}}}"
    return literal


def _appended(text: str, node: Any, item: Any, format_: str) -> str:
    if node.flow_style or not node.value:
        at = node.end_mark.index - 1
        return f"{text[:at]}{', ' if node.value else ''}{_literal(item, format_)}{text[at:]}"
    first = node.value[0].start_mark
    # in front of the first item, whose dash is found; where the last one ends is not certain
    begin = text.rindex("-", 0, first.index)
    return (
        f"{text[:begin]}- {_literal(item, format_)}\n{' ' * node.start_mark.column}{text[begin:]}"
    )


def _added(text: str, node: Any, parts: list[str], value: Any, format_: str) -> str:
    literal, is_top = _nested(parts[1:], value, format_), node.start_mark.column == 0
    name = json.dumps(parts[0]) if format_ == "JSON" else parts[0]
    if format_ != "JSON" and is_top and not node.flow_style:
        block = f"{name}:{_block(parts[1:], value, format_)}"
        return text + ("" if text.endswith("\n") or not text else "\n") + block + "\n"
    if not node.value:
        # `{}`: behind the brace
        at = node.start_mark.index + 1
        return f"{text[:at]}{name}: {literal}{text[at:]}"
    first = node.value[0][0].start_mark
    line = text[text.rfind("\n", 0, first.index) + 1 : first.index]
    gap = f"\n{line}" if not line.strip() and first.line > 0 else " "
    comma = "," if node.flow_style else ""
    if not node.flow_style and line.strip():
        raise UserError(parts[0])
    return f"{text[: first.index]}{name}: {literal}{comma}{gap}{text[first.index :]}"


def _block(parts: list[str], value: Any, format_: str, indent: str = "  ") -> str:
    if not parts:
        return f" {_literal(value, format_)}"
    return f"\n{indent}{parts[0]}:{_block(parts[1:], value, format_, indent + '  ')}"


def _in_toml(text: str, key: str, value: Any) -> str:
    section, _, name = key.rpartition(".")
    literal = _literal(value, "TOML")
    lines, here = text.splitlines(keepends=True), ""
    for number, line in enumerate(lines):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            here = header[1].strip()
        elif here == section and (found := re.match(rf"(\s*{re.escape(name)}\s*=\s*)", line)):
            # a string or a bare value, without a comment behind it; arrays are left alone
            rest = re.match(r"""("[^"]*"|'[^']*'|[^\s#"'\[]+)""", line[found.end() :])
            if rest is None:
                raise UserError(key)
            lines[number] = line[: found.end()] + literal + line[found.end() + rest.end() :]
            return "".join(lines)
    for number, line in enumerate(lines):
        if re.match(rf"\s*\[{re.escape(section)}\]", line):
            lines.insert(number + 1, f"{name} = {literal}\n")
            return "".join(lines)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{end}\n[{section}]\n{name} = {literal}\n"


def _in_command(text: str, key: str, value: Any, source: Source) -> str:
    spelled = rf"--{re.escape(key).replace('_', '[-_]')}"
    found = list(re.finditer(rf"(?<!\S){spelled}(=|[ \t]+)([^\s\\-]\S*)", text))
    if found:
        last = found[-1]
        return f"{text[: last.start(2)]}{shlex.quote(str(value))}{text[last.end(2) :]}"
    if re.search(rf"(?<!\S)(?:{spelled}|--no[-_]{spelled[2:]})(?!\S)", text):
        raise UserError(key)
    flags = [re.escape(name).replace("_", "[-_]") for name in source.flat]
    places = [
        place for name in flags for place in re.finditer(rf"(?<!\S)--{name}(?=[=\s]|$)", text)
    ]
    if not places:
        raise UserError(key)
    # in front of the last flag: behind it may stand values, a comment or a continued line
    at = max(place.start() for place in places)
    return f"{text[:at]}{_option(key, value)} {text[at:]}"
