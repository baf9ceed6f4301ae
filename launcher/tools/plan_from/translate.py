"""Turn a file's keys into facts by its trainer's table, and facts into flags of a training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from launcher.tools.plan_from.engines import ENGINES, Engine
from launcher.tools.plan_from.keys import OFF, Facts, Kind, Unknown, is_on
from launcher.tools.plan_from.kinds import KINDS
from launcher.tools.plan_from.kinds.deepspeed import DEEPSPEED
from launcher.tools.plan_from.kinds.transformers import TRAINING_ARGUMENTS
from launcher.tools.plan_from.reading import SUFFIXES, Source, read_source
from launcher.util.errors import UserError, one_line

# one alone, such as learning_rate, may be in any YAML file
FEWEST_MARKS: Final = 2
# folders above a config in which the files that it names are looked for
_COMPANIONS: Final = 4
# files that launch or configure another trainer's run: behind its own file
_SERVES: Final = {"deepspeed": 1, "accelerate": 2}
_RECOMPUTES: Final = "activation_checkpointing"
_MODES: Final = ("none", "selective", "full", "offload")
_MARK_ALONE: Final = {
    "per_device_train_batch_size": TRAINING_ARGUMENTS,
    "zero_optimization.stage": DEEPSPEED,
}


class WrongValue(UserError):
    """A value that the config's own trainer refuses, too."""


@dataclass(kw_only=True)
class Reading:
    """The facts of one run, read from one or more files."""

    kind: Kind
    source: Source
    facts: Facts
    words: list[tuple[str, Any, Facts]] = field(default_factory=list)
    """(their key, its value, our facts)"""
    left_out: list[str] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, facts: Facts) -> None:
        """Add the facts of a key; one that is off does not undo another."""
        if facts.get("mixed", "") is None and self.facts.get("mixed"):
            return  # `bf16: false` below `fp16: true`
        self.facts = _together(self.facts, facts)

    @property
    def engine(self) -> Engine:
        """Row of the trainer."""
        return ENGINES[self.kind.engine]


def kind_of(source: Source) -> Kind | None:
    """Return the trainer whose marks a file has most of; where it has fewer than two, the one whose
    mark alone is enough, or None."""

    def marks(kind: Kind) -> int:
        return sum(mark in source.flat for mark in kind.marks.split())

    best = max(KINDS, key=marks)
    if marks(best) >= FEWEST_MARKS:
        return best
    return next((kind for mark, kind in _MARK_ALONE.items() if mark in source.flat), None)


def read_files(sources: Sequence[Source]) -> Reading:
    """Read a run from its files: a trainer's own wins over one that launches it, else the first.

    Raises:
        UserError: a file is of no known trainer, or one that it names cannot be read.
    """
    readings = list[Reading]()
    given = frozenset(source.path.name for source in sources)
    for source in sources:
        kind = kind_of(source)
        if kind is None:
            keys = ", ".join(list(source.flat)[:4]) or "none"
            raise UserError(
                f"{source.path}: its keys ({keys}) are of no trainer known here: give a config of "
                + ", ".join(dict.fromkeys(each.name.split()[0] for each in KINDS))
                + ", or plan the run by flags, without --from"
            )
        readings.append(_read(kind, source))
        _read_companions(readings[-1], given)
    # the file of the trainer goes first, whose engine and words count
    reading, *others = sorted(readings, key=lambda each: _SERVES.get(each.kind.engine, 0))
    for other in others:
        reading.facts = _launched(reading, other)
        reading.words += other.words
        reading.left_out += other.left_out
        reading.no_effect += other.no_effect
    if any(other.kind is DEEPSPEED for other in others):
        reading.facts.pop("absent", None)  # this is the file
    reading.facts = dict(reading.kind.defaults) | reading.facts
    if reading.facts.get("engine") == "deepspeed" and not {"strategy", "absent"} & {*reading.facts}:
        # accelerate's stage where nothing says one: utils/dataclasses.py, DeepSpeedPlugin
        reading.facts |= {"strategy": "zero", "zero": 2}
    return reading


def configured(source: Source) -> Source:
    """Return the config that a command line names, below its other flags; else the source."""
    named = str(source.flat.get("config", ""))
    path = _beside(source.path, named) if source.format == "shell" else None
    if path is None:
        return source
    return read_source(path).under({k: v for k, v in source.flat.items() if k != "config"})


def _launched(trainer: Reading, launcher: Reading) -> Facts:
    """Return the facts of a trainer's file beside one that launches it, over which it wins."""
    if launcher.kind.engine in _SERVES:
        return _together(launcher.facts, trainer.facts)
    return launcher.facts | trainer.facts


def _together(below: Facts, above: Facts) -> Facts:
    """Return facts of which those above win, but either recomputes: FSDP's or the trainer's own."""
    asked = [one[_RECOMPUTES] for one in (below, above) if _RECOMPUTES in one]
    most = {_RECOMPUTES: max(asked, key=_MODES.index)} if asked else {}
    return {**below, **above, **most}


def _read(kind: Kind, source: Source, place: str = "") -> Reading:
    reading = Reading(kind=kind, source=source, facts={})
    flat = dict(source.flat)
    if flat.get("bf16") == "auto" and is_on(flat.get("fp16")):  # Axolotl's, over which fp16 wins
        reading.no_effect.append(f"{place}bf16")
        del flat["bf16"]
    for key, value in flat.items():
        reader = kind.reader(key)
        if value is True and reader is None and (reader := kind.reader(key.removeprefix("no_"))):
            key, value = key.removeprefix("no_"), False  # a switch that is on by default
        shown = place + key
        if reader is not None and "$" in str(value):
            _leave_out_variable(reading, shown, value)
        elif reader is not None:
            try:
                facts = reader(value)
            except Unknown as error:
                reading.left_out.append(f"{shown} {one_line(str(value), 60)}: {error}")
                reading.facts |= error.facts
                continue
            except ValueError as error:
                raise WrongValue(
                    f"{source.path}: {key} {value!r:.60} {error}: correct it"
                ) from None
            if {"bf16", "fp16"} == {facts.get("mixed"), reading.facts.get("mixed")}:
                raise WrongValue(
                    f"{source.path}: {key} {value} beside {reading.facts['mixed']} asks for two "
                    "precisions: keep one"
                )
            reading.take(facts)
            if facts:
                reading.words.append((shown, value, facts))
            else:
                reading.no_effect.append(shown)
        elif value in OFF or value in ([], {}):
            reading.no_effect.append(shown)
        elif (reason := kind.reason(key)) is not None:
            if value == 1 and value is not True:  # a degree of 1 asks for nothing
                reading.no_effect.append(shown)
            elif place + reason not in reading.left_out:
                reading.left_out.append(place + reason)
        elif kind.has_no_effect(key):
            reading.no_effect.append(shown)
        else:
            reading.left_out.append(f"{shown}: not known here")
    return reading


def _leave_out_variable(reading: Reading, key: str, value: Any) -> None:
    """Note a value that only the shell knows; two have to be given, on which most bytes depend."""
    text = f"{key} {one_line(str(value), 60)}: known only to the shell"
    if key in (
        "deepspeed",
        "deepspeed_config",
        "deepspeed_config_file",
        "zero_stage",
        "deepspeed_stage",
    ):
        reading.facts["absent"] = text
    elif key == reading.kind.micro_batch:
        reading.facts["batch of the shell"] = text
    else:
        reading.left_out.append(text)


def _read_companions(
    reading: Reading, given: frozenset[str], seen: frozenset[Path] = frozenset()
) -> None:
    """Read the files that a config names, where they lie beside it or in the working folder.

    Args:
        given: names of the files that are read anyway.
        seen: files that are being read; a config that names one of them does so in a circle.
    """
    seen |= {reading.source.path.resolve()}
    for what in ("deepspeed", "config_file", "fsdp_config"):
        named = reading.facts.pop(f"companion {what}", None)
        if named is None:
            continue
        path = _beside(reading.source.path, str(named))
        if path is None and Path(str(named)).name in given:
            continue
        if path is None:
            text = f"{what} {one_line(str(named), 60)}: not beside this file"
            if what == "fsdp_config":
                reading.left_out.append(text)  # `fsdp` says the sharding
            else:
                reading.facts["absent"] = text
            continue
        if path.resolve() in seen:
            raise WrongValue(
                f"{reading.source.path}: {what} {named!r:.60} leads back to a file that names it: "
                "correct it"
            )
        other = read_source(path)
        kind = DEEPSPEED if what == "deepspeed" else kind_of(other)
        if what == "fsdp_config":
            kind = reading.kind
            other = other._replace(flat={f"{what}.{key}": v for key, v in other.flat.items()})
        if kind is None:
            reading.left_out.append(f"{what} {path.name}: of no trainer known here")
            continue
        found = _read(kind, other, f"{path.name}: ")
        _read_companions(found, given, seen)
        if what == "deepspeed":
            # the trainer's own batch counts: transformers rejects a file with another
            batch = {"micro_batch", "accumulation", "global_batch"} & reading.facts.keys()
            # DeepSpeed's own stage is 0
            whole = {"strategy": "ddp"} | found.facts
            reading.facts |= {k: v for k, v in whole.items() if k not in batch}
        else:
            reading.facts = _launched(reading, found)
        facts = reading.facts.items()
        reading.words += [word for word in found.words if word[2].items() & facts]
        reading.left_out += found.left_out
        reading.no_effect += found.no_effect


def _beside(file: Path, named: str) -> Path | None:
    """Return a file that a config names: only one of the same project, since configs are not
    trusted."""
    relative = Path(named)
    if relative.is_absolute() or ".." in relative.parts:
        relative = Path(relative.name)
    if relative.suffix not in (*SUFFIXES, ".conf"):
        return None
    folders = [file.parent, *list(file.resolve().parents)[:_COMPANIONS], Path()]
    for folder in folders:
        try:
            if (folder / relative).is_file():
                return folder / relative
        except OSError:
            return None
    return None
