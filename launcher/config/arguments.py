"""Flags and YAML -> RunConfig. One parser for both: a file's keys become flags that come first."""

import contextlib
import difflib
import io
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from launcher.config import deepspeed_file
from launcher.config.schema import AutoMicroBatch, RunConfig, field_types
from launcher.config.yaml_file import read_yaml
from launcher.errors import UserError
from launcher.flags import fields_of, flag, is_number, usable_path
from launcher.startup import reader_may_leave

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
AUTO = f"{MICRO_BATCH}=auto"


def parse_run_config(
    argv: Sequence[str], prog: str = "launcher.train", world_size: int | None = None
) -> RunConfig:
    """Build the run's config from `[--config FILE] [flags]`, and a DeepSpeed file they name.

    Without a world size, what a DeepSpeed file's batch sizes come to on it stays open.

    Raises:
        UserError: unknown flag or key, wrong type, unreadable file, values out of range.
        SystemExit: after printing `--help`.
    """
    flags, file = _split_config(argv)
    if not set(flags) & set(HELP):
        flags = _checked_flags(flags)
    tokens = [*(_flags_of_file(file, fields_of(flags)) if file else []), *flags]
    sizes = [token for token in tokens if token.startswith(f"{MICRO_BATCH}=")]
    with one_sentence():
        config = tyro.cli(
            RunConfig,
            args=[token for token in tokens if token != AUTO],
            prog=prog,
            description="Train a decoder. --config FILE.yaml reads the same names from a file.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    if sizes[-1:] == [AUTO]:
        config = config.replace(micro_batch=AutoMicroBatch())
    return deepspeed_file.adopt(config, fields_of(tokens), world_size)


def print_help_if_asked(argv: Sequence[str]) -> None:
    """List the flags and end, if `argv` asks for that: without the seconds that torch takes."""
    if set(argv) & set(HELP):
        # What is wrong is refused by who runs this, as always.
        with contextlib.suppress(UserError), reader_may_leave():
            parse_run_config(argv)


def with_micro_batch(argv: Sequence[str], size: int) -> list[str]:
    """The same arguments with `--micro-batch SIZE` instead of what they say."""
    kept: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, has_value, _ = token.partition("=")
        if name.replace("_", "-") != MICRO_BATCH:
            kept.append(token)
        elif not has_value:
            next(tokens)
    return [*kept, f"{MICRO_BATCH}={size}"]


def _split_config(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """The flags, spelled with dashes, and the file of `--config`."""
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
        file = _path_of("--config", value)
    return flags, file


def _checked_flags(tokens: Sequence[str]) -> list[str]:
    """The same flags in the one form that the parser takes for certain.

    argparse would take `-1e-3` for a flag, and reports a bad value without saying what is good.
    """
    annotations = {flag(name): annotation for name, annotation in field_types().items()}
    negated = {"--no-" + name[2:]: name for name, kind in annotations.items() if _is_bool(kind)}
    known = [*annotations, *negated, *HELP]
    checked: list[str] = []
    left = list(tokens)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        if not name.startswith("-"):
            raise UserError(
                f"{name!r} belongs to no flag: write --NAME VALUE; --help lists the flags"
            )
        if name not in known:
            raise UserError(f"unknown flag {name}{_nearest(name, known)}")
        annotation = annotations[negated.get(name, name)]
        values = [value] if has_value else []
        while not has_value and len(values) < _arity(annotation) and left and _is_value(left[0]):
            values.append(left.pop(0))
        if _is_bool(annotation) and not values:
            checked += _bool_flag(negated.get(name, name), annotation, value=name not in negated)
            continue
        if name in negated or annotation is bool:
            raise UserError(f"{name} takes no value, but got {value!r}: leave the value out")
        if len(values) < _arity(annotation):
            raise UserError(f"{name} needs a value: {_expected(annotation)}")
        if f"{name}={values[0]}" != AUTO and not all(_fits(text, annotation) for text in values):
            shown = " ".join(text or "''" for text in values)
            or_auto = ", or auto" if name == MICRO_BATCH else ""
            raise UserError(f"{name} {shown} must be {_expected(annotation)}{or_auto}")
        if _names_file(name, annotation):
            values = [_expanded(name, annotation, values[0])]
        checked += [name, *values] if len(values) > 1 else [f"{name}={values[0]}"]
    return checked


def _bool_flag(name: str, annotation: Any, *, value: bool) -> list[str]:
    if annotation is not bool:  # bool | None, which the parser wants spelled out
        return [f"{name}={value}"]
    return [name if value else "--no-" + name[2:]]


def _is_value(token: str) -> bool:
    return not token.startswith("-") or is_number(token, float)


def _nearest(name: str, known: Iterable[str]) -> str:
    by_word = {candidate.lstrip("-"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), by_word, n=1)
    close = close or difflib.get_close_matches(name.lstrip("-"), by_word, n=1)
    return f": did you mean {by_word[close[0]]}?" if close else "; --help lists them all"


def _flags_of_file(path: Path, replaced: set[str]) -> list[str]:
    """The file's entries as flags, without those that a flag replaces."""
    for name in tuple(replaced):
        replaced.update(SUPERSEDES.get(name, ()))
    annotations = field_types()
    tokens: list[str] = []
    try:
        content = read_yaml(path)
    except UserError as error:
        raise UserError(f"--config {error}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path}: holds {content!r:.40}, but must hold lines of `key: value`"
        )
    for key, value in content.items():
        if key not in annotations:
            raise UserError(
                f"--config {path}: unknown key {key!r}{_nearest(str(key), annotations)}"
            )
        if key not in replaced and value is not None:
            tokens += _flag_of_entry(path, key, value, annotations[key])
    return tokens


def _flag_of_entry(path: Path, key: str, value: Any, annotation: Any) -> list[str]:
    if f"{flag(key)}={value}" == AUTO:
        return [AUTO]
    several = _arity(annotation) > 1
    values = value if several and isinstance(value, list) else [value]
    if (
        len(values) != max(1, _arity(annotation))
        or any(isinstance(item, bool) != _is_bool(annotation) for item in values)
        or any(not isinstance(item, str) and _is_text(annotation) for item in values)
        or not all(_fits(str(item), annotation) for item in values)
    ):
        expected = _expected(annotation).lower()
        if several:
            expected += ", as in [0.9, 0.95]"
        elif _is_text(annotation):
            expected += ", in quotes"
        raise UserError(f"--config {path}: {key} is {value!r}, but must be {expected}")
    if _is_bool(annotation):
        return _bool_flag(flag(key), annotation, value=value)
    if _names_file(flag(key), annotation):
        values = [_expanded(f"--config {path}: {key}", annotation, value)]
    return [flag(key), *map(str, values)] if several else [f"{flag(key)}={value}"]


def _plain(annotation: Any) -> Any:
    """`X | None` -> `X`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation


def _word(annotation: Any) -> str | None:
    """`all` of `int | Literal["all"]`."""
    members = typing.get_args(annotation)[1:] if _plain(annotation) is int else ()
    words = (a for member in members for a in typing.get_args(member))
    return next(words, None)


def _is_bool(annotation: Any) -> bool:
    return _plain(annotation) is bool


def _names_file(name: str, annotation: Any) -> bool:
    return _plain(annotation) is Path or name in ("--data", "--tokenizer")


def _expanded(name: str, annotation: Any, text: str) -> str:
    """A path, usable and with its `~` expanded; other text that may be one, as it is."""
    path = _path_of(name, text.removeprefix("hf:"))
    return str(path) if _plain(annotation) is Path else text


def _path_of(name: str, text: str) -> Path:
    try:
        return usable_path(text)
    except UserError as error:
        raise UserError(f"{name} {error}") from None


def _is_text(annotation: Any) -> bool:
    return _plain(annotation) in (str, Path)


def _arity(annotation: Any) -> int:
    """How many values a flag of this type takes."""
    if typing.get_origin(annotation) is tuple:
        return len(typing.get_args(annotation))
    return 0 if annotation is bool else 1


def _expected(annotation: Any) -> str:
    """What a value of this type looks like, in words."""
    kind = _plain(annotation)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_arity(kind)} numbers"
    if _word(annotation) is not None:
        return f"a whole number, or {_word(annotation)}"
    words = {int: "a whole number", float: "a number", bool: "True or False"}
    return words.get(kind, "text")


def _fits(text: str, annotation: Any) -> bool:
    kind = _plain(annotation)
    if text == "None" and types.NoneType in typing.get_args(annotation):
        return True
    if text == _word(annotation):
        return True
    if typing.get_origin(kind) is Literal:
        return text in map(str, typing.get_args(kind))
    if kind is bool:
        return text in ("True", "False")
    if _is_text(kind):
        return text != ""
    return is_number(text, int if kind is int else float)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turn tyro's boxed error into a UserError; what it prints for --help passes through."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            yield
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        lines = [line.strip("│╭╮╰╯─ ") for line in captured.getvalue().splitlines()]
        body = lines[1:]
        end = next((i for i, line in enumerate(body) if not line), len(body))
        raise UserError(" ".join(body[:end]).replace("Error parsing ", "")) from None
