"""Read flags and YAML into a RunConfig, both by the types of its fields."""

import difflib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from launcher.config import old_names
from launcher.config.schema import AutoMicroBatch, RunConfig, field_types
from launcher.config.sharding_labels import expand_label, is_label
from launcher.config.transformers_config import tokenizer_of
from launcher.util.errors import ExitCode, UserError, naming, tell
from launcher.util.flags import flag, is_number, usable_path, without
from launcher.util.hub_cache import model_folder
from launcher.util.startup import reader_may_leave

# Values that contradict each other when one comes from the file and the other from a flag:
# the flag's word is the newer one, so the file's is dropped.
SUPERSEDES = {
    "zero": ("strategy", "deepspeed"),
    "strategy": ("zero", "deepspeed"),
    "deepspeed": ("zero", "strategy"),
    "steps": ("epochs",),
    "epochs": ("steps",),
}
HELP = ("-h", "--help")
MICRO_BATCH = "--micro-batch"


def parse_run_config(argv: Sequence[str], world_size: int | None = None) -> RunConfig:
    """Build the run's config from `[--config FILE] [flags]`, and a DeepSpeed file they name.

    Without a world size, what a DeepSpeed file's batch sizes come to on it stays open.

    Raises:
        UserError: unknown flag or key, wrong type, unreadable file, values out of range.
        SystemExit: after printing `--help`.
    """
    print_help_if_asked(argv)
    flags, file = _split_config(argv)
    given = _values_of_flags(flags)
    if file is not None:
        given = _values_of_file(file, given) | given
    config = RunConfig().replace(**given)
    if config.model.init_from is not None:
        from launcher.config import init_from

        config = init_from.adopt(config, given, lambda path: _values_of_file(path, ()))
    elif "tokenizer" not in given and (found := tokenizer_of(config.model.model)) is not None:
        config = config.replace(tokenizer=str(found))
    if config.sharding.deepspeed is not None:
        from launcher.config import deepspeed_file

        config = deepspeed_file.adopt(config, given, world_size)
    return config


def print_help_if_asked(argv: Sequence[str]) -> None:
    """Print help and exit if `argv` asks for it, before torch is imported.

    Raises:
        SystemExit: afterwards, or with 2 for help on something unknown.
    """
    if not any(token.partition("=")[0] in HELP for token in argv):
        return
    from launcher.config.help_text import help_text, topic_of

    try:
        text = help_text(topic_of(argv, HELP))
    except UserError as error:
        tell(error)
        sys.exit(ExitCode.REFUSED)
    with reader_may_leave():
        print(text)
    sys.exit(ExitCode.DONE)


def with_micro_batch(argv: Sequence[str], size: int) -> list[str]:
    """Return the arguments with `--micro-batch SIZE` in place of theirs."""
    kept = without(argv, MICRO_BATCH, "--micro_batch")
    return [*kept, f"{MICRO_BATCH}={size}"]


def _split_config(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the flags, spelled with dashes, and the file of `--config`."""
    flags: list[str] = []
    file: Path | None = None
    tokens = iter(argv)
    for token in tokens:
        name, has_value, value = token.partition("=")
        if name != "--config":
            # Both spellings are accepted; one is used from here on.
            dashed = name.replace("_", "-") if name.startswith("--") else name
            flags.append(dashed + has_value + value)
            continue
        if not has_value:
            value = next(tokens, "")
        if not value or value.startswith("--"):
            raise UserError("--config needs a file name, for example --config run.yaml")
        if file is not None:
            raise UserError(f"--config is given twice, {file} and {value}: give one file")
        with naming("--config"):
            file = usable_path(value)
    return flags, file


def _values_of_flags(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse flags that are spelled with dashes into field -> value."""
    names = {flag(name): name for name in field_types()}
    negated = {
        f"--no-{own[2:]}": name for own, name in names.items() if _is_bool(field_types()[name])
    }
    names |= negated
    values: dict[str, Any] = {}
    left = old_names.in_flags(tokens)
    while left:
        own, has_value, value = left.pop(0).partition("=")
        if not own.startswith("-"):
            raise UserError(
                f"{own!r} belongs to no flag: write --NAME VALUE; --help all lists the flags"
            )
        if own not in names:
            raise UserError(f"unknown flag {own}{_nearest(own, [*names, *HELP])}")
        name, kind = names[own], field_types()[names[own]]
        texts = [value] if has_value else []
        while not has_value and len(texts) < _arity(kind) and left and _is_value(left[0]):
            texts.append(left.pop(0))
        if _is_bool(kind) and not texts:
            values[name] = own not in negated
            continue
        if own in negated:
            raise UserError(f"{own} takes no value, but got {value!r}: leave the value out")
        if len(texts) < _arity(kind):
            raise UserError(f"{own} needs a value: {_expected(kind)}")
        try:
            values[name] = _value(name, texts, said=own)
        except ValueError:
            shown = " ".join(text or "''" for text in texts)
            or_auto = ", or auto" if own == MICRO_BATCH else ""
            raise UserError(f"{own} {shown} must be {_expected(kind)}{or_auto}") from None
    expand_label(values, "--strategy")
    return values


def _is_value(token: str) -> bool:
    return not token.startswith("-") or is_number(token, float)


def _nearest(name: str, known: Iterable[str]) -> str:
    from launcher.config.foreign_names import answer

    if (instead := answer(name)) is not None:
        return f": {instead}"
    by_word = {candidate.lstrip("-"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), by_word, n=1)
    close = close or difflib.get_close_matches(name.lstrip("-"), by_word, n=1)
    return f": did you mean {by_word[close[0]]}?" if close else "; --help all lists them"


def _values_of_file(path: Path, given: Collection[str]) -> dict[str, Any]:
    """Read a file into field -> value, without the fields that a flag replaces."""
    from launcher.config.yaml_file import read_yaml  # most runs have flags only

    replaced = {*given, *(old for name in given for old in SUPERSEDES.get(name, ()))}
    with naming("--config"):
        content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path}: holds {content!r:.40}, but must hold lines of `key: value`"
        )
    values: dict[str, Any] = {}
    with naming(f"--config {path}:"):
        content = old_names.in_file(content)
        if unknown := [key for key in content if key not in field_types()]:
            nested = ": write the keys below it at the left margin"
            fix = _nearest(str(unknown[0]), field_types())
            fix = nested if isinstance(content[unknown[0]], dict) else fix
            raise UserError(f"unknown key {unknown[0]!r}{fix}")
    for key, value in content.items():
        if key not in replaced and value is not None:
            values[key] = _value_of_entry(path, key, value)
    expand_label(values, f"--config {path}: strategy")
    return values


def _value_of_entry(path: Path, key: str, value: Any) -> Any:
    kind = field_types()[key]
    several = _arity(kind) > 1
    items = value if several and isinstance(value, list) else [value]
    typed = [item for item in items if item != _word(kind)]
    try:
        if (
            len(items) != max(1, _arity(kind))
            or any(
                str(i) not in old_names.SWITCHES if _is_bool(kind) else isinstance(i, bool)
                for i in typed
            )
            or any(not isinstance(item, str) and _plain(kind) in (str, Path) for item in items)
        ):
            raise ValueError(value)
        return _value(key, [str(item) for item in items], said=f"--config {path}: {key}")
    except ValueError:
        expected = _expected(kind).lower()
        if several:
            expected += ", as in [0.9, 0.95]"
        elif _plain(kind) in (str, Path):
            expected += ", in quotes"
        raise UserError(f"--config {path}: {key} is {value!r}, but must be {expected}") from None


def _value(name: str, texts: Sequence[str], *, said: str) -> Any:
    """Parse the texts of one field; `said` names its place in a refusal.

    Raises:
        UserError: a path that cannot be one.
        ValueError: not of the field's type.
    """
    kind = field_types()[name]
    if name == "micro_batch" and texts == ["auto"]:
        return AutoMicroBatch()
    if name == "strategy" and is_label(label := texts[0].lower()):
        return label
    values = [_typed(text, kind) for text in texts]
    with naming(said):
        if name in ("data", "tokenizer", "model"):
            usable_path(texts[0].removeprefix("hf:"))
        elif isinstance(values[0], Path):
            path = usable_path(texts[0])
            return model_folder(path) if name == "init_from" else path
    return tuple(values) if len(values) > 1 else values[0]


def _typed(text: str, annotation: Any) -> Any:
    """Parse `text` as a type; raises ValueError if it is none of its values."""
    kind = _plain(annotation)
    if text == "None" and types.NoneType in typing.get_args(annotation):
        return None
    if text == _word(annotation):
        return None if kind is bool else text
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if str(choice) == text.lower():  # FSDP, AdamW, BF16
                return choice
    elif kind is bool:
        if text in old_names.SWITCHES:
            return old_names.SWITCHES[text]
    elif kind in (str, Path):
        if text:
            return kind(text)
    elif is_number(text, number := int if kind is int else float):
        return number(text)
    raise ValueError(text)


def _plain(annotation: Any) -> Any:
    """`X | None` -> `X`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation


def _word(annotation: Any) -> str | None:
    """Return the word that a type also takes: `all` of `int | Literal["all"]`, and `auto` of
    `bool | None`."""
    if _is_bool(annotation):
        return None if annotation is bool else "auto"
    members = typing.get_args(annotation)[1:] if _plain(annotation) is int else ()
    words = (a for member in members for a in typing.get_args(member))
    return next(words, None)


def _is_bool(annotation: Any) -> bool:
    return _plain(annotation) is bool


def _arity(annotation: Any) -> int:
    """Return the number of values that a flag of this type takes."""
    kind = _plain(annotation)
    if typing.get_origin(kind) is tuple:
        return len(typing.get_args(kind))
    return 0 if annotation is bool else 1  # `bool | None` takes on, off or auto


def _expected(annotation: Any) -> str:
    """Describe the values of a type for a refusal."""
    kind = _plain(annotation)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_arity(kind)} numbers"
    if _word(annotation) is not None:
        values = "on, off" if kind is bool else "a whole number,"
        return f"{values} or {_word(annotation)}"
    words = {int: "a whole number", float: "a number", bool: "True or False"}
    return words.get(kind, "text")
