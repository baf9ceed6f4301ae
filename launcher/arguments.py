"""Flags and YAML -> RunConfig. One parser for both: a file's keys become flags that come first."""

import contextlib
import difflib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml

from launcher.config import RunConfig, field_types, flag
from launcher.errors import UserError

# Values that contradict each other when one comes from the file and the other from a flag:
# the flag's word is the newer one, so the file's is dropped.
SUPERSEDES = {
    "zero": ("strategy", "deepspeed"),
    "strategy": ("zero", "deepspeed"),
    "deepspeed": ("zero", "strategy"),
    "steps": ("epochs",),
    "epochs": ("steps",),
}


def parse_run_config(argv: Sequence[str], prog: str = "launcher.train") -> RunConfig:
    """Build the run's config from `[--config FILE] [flags]`.

    Raises:
        UserError: unknown flag or key, wrong type, unreadable file, values out of range.
        SystemExit: after printing `--help`.
    """
    flags, files = _split_config(argv)
    _refuse_unknown_flags(flags)
    from_file: list[str] = []
    if files:
        given = {token.split("=")[0] for token in flags if token.startswith("--")}
        from_file = _flags_of_file(files[-1], given)
    with _one_sentence(files[-1] if files and not flags else None):
        return tyro.cli(
            RunConfig,
            args=[*from_file, *flags],
            prog=prog,
            description="Train a decoder. --config FILE.yaml reads the same names from a file.",
            config=(tyro.conf.OmitArgPrefixes,),
        )


def _split_config(argv: Sequence[str]) -> tuple[list[str], list[Path]]:
    flags: list[str] = []
    files: list[Path] = []
    tokens = iter(argv)
    for token in tokens:
        name, has_value, value = token.partition("=")
        if name != "--config":
            # Both spellings are accepted; one is used from here on.
            dashed = name.replace("_", "-") if name.startswith("--") else name
            flags.append(dashed + has_value + value if name.startswith("--") else token)
            continue
        if not has_value:
            value = next(tokens, "")
        if not value:
            raise UserError("--config needs a file name, for example --config run.yaml")
        files.append(Path(value))
    return flags, files


def _refuse_unknown_flags(flags: Sequence[str]) -> None:
    known = {"-h", "--help"}
    for name, annotation in field_types().items():
        known.add(flag(name))
        if annotation is bool:
            known.add("--no-" + flag(name)[2:])
    for token in flags:
        name = token.split("=")[0]
        if name.startswith("--") and name not in known:
            raise UserError(f"unknown flag {name}{_nearest(name, known)}")


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f": did you mean {close[0]}?" if close else "; --help lists them all"


def _flags_of_file(path: Path, given: set[str]) -> list[str]:
    """The file's entries as flags, without those that a flag replaces."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise UserError(f"--config {path}: not valid YAML ({where})") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path}: holds a {type(content).__name__}, not `key: value` lines"
        )
    replaced = {name.removeprefix("--").replace("-", "_") for name in given}
    for name in tuple(replaced):
        replaced.update(SUPERSEDES.get(name, ()))
    types = field_types()
    tokens: list[str] = []
    for key, value in content.items():
        if key not in types:
            hint = _nearest(str(key), set(types))
            raise UserError(
                f"--config {path}: unknown key {key!r}{hint.replace('--help', 'the help')}"
            )
        if key not in replaced and value is not None:
            tokens += _flag_of_entry(path, key, value, types[key])
    return tokens


def _flag_of_entry(path: Path, key: str, value: Any, annotation: Any) -> list[str]:
    if annotation is bool:
        if not isinstance(value, bool):
            raise UserError(f"--config {path}: {key} is {value!r}, but must be true or false")
        return [flag(key)] if value else ["--no-" + flag(key)[2:]]
    if isinstance(value, list | tuple):
        return [flag(key), *map(str, value)]
    if isinstance(value, dict):
        raise UserError(f"--config {path}: {key} holds a mapping, but must be a single value")
    return [f"{flag(key)}={value}"]


@contextlib.contextmanager
def _one_sentence(file: Path | None) -> Iterator[None]:
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
        sentence = " ".join(body[:end]).replace("Error parsing ", "")
        raise UserError(f"--config {file}: {sentence}" if file else sentence) from None
