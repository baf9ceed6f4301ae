"""Read a DeepSpeed file by the table: values of our fields, and what DeepSpeed gets of it."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from launcher.config.deepspeed_file.table import AUTO, KEYS, RENAMED, SECTIONS
from launcher.optim.choice import PRECISIONS, OptimizerName
from launcher.util.errors import naming
from launcher.util.json_file import JsonObject, brief, read_json

MOST_BYTES = 2**20
LARGEST = 2**62  # DeepSpeed counts in int64
SCHEDULES: Mapping[str, tuple[str, float]] = {
    "WarmupLR": ("constant", 1.0),
    "WarmupCosineLR": ("cosine", 0.0001),
    "WarmupDecayLR": ("linear", 0.0),
}
"""Theirs -> ours, and the ratio of the rate at its end, unless they say one."""


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, least: int) -> bool:
    return _finite(value) and value == int(value) and least <= value <= LARGEST


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "stage": (lambda v: type(v) is int and v in (0, 1, 2, 3), "0, 1, 2 or 3"),
    "count": (lambda v: _whole(v, 1), "a whole number of at least 1"),
    "even": (lambda v: _whole(v, 0) and v % 2 == 0, "an even whole number"),
    "size": (lambda v: _whole(v, 0), "a whole number of at least 0"),
    "power": (lambda v: _whole(v, 0) and v <= 62, "a whole number from 0 to 62"),
    "number": (_finite, "a number"),
    "ratio": (lambda v: _finite(v) and 0 < v <= 1, "more than 0 and at most 1"),
    "text": (lambda v: isinstance(v, str) and v != "", "text"),
    "pair": (lambda v: isinstance(v, list) and len(v) == 2 and all(map(_finite, v)), "two numbers"),
    "device": (lambda v: v in ("none", "cpu", "nvme"), "none, cpu or nvme"),
    "type": (lambda v: v in ("fp32", "bf16"), "fp32 or bf16"),
    "any": (lambda v: True, ""),
}
"""kind -> whether a value is one, and in words what it must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A file's value of one field of RunConfig."""

    key: str
    shown: str
    """As it stands in the file."""
    value: Any
    also: tuple[Any, ...] = ()
    """Other values of the field that do not contradict it."""


@dataclass(kw_only=True, slots=True)
class DeepSpeedFile:
    """A parsed file; `problems` are phrases, each with its fix."""

    values: dict[str, Any] = field(default_factory=dict)
    """Place in the table -> value, where it is neither auto nor null."""
    spelled: dict[str, str] = field(default_factory=dict)
    """Place in the table -> the name that the file uses."""
    fields: dict[str, Said] = field(default_factory=dict)
    passed: JsonObject = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def say(
        self, name: str, place: str, value: Any, shown: str = "", also: tuple[Any, ...] = ()
    ) -> None:
        """Note that the file asks for `value` of the field `name`."""
        key = self.spelled.get(place, place)
        said = Said(key=key, shown=shown or brief(self.values[place]), value=value, also=also)
        before = self.fields.setdefault(name, said)
        if before.value != value:
            self.problems.append(
                f"{before.key} {before.shown} and {key} {said.shown} differ: here they are the same"
            )


def read_file(path: Path) -> DeepSpeedFile:
    """Read a file and classify its keys.

    Raises:
        UserError: it cannot be read, or is no JSON object.
    """
    file = DeepSpeedFile()
    with naming("--deepspeed"):
        content = read_json(path, what="a JSON file", most_bytes=MOST_BYTES)
    _collect(file, content, "", "")
    for place, value in tuple(file.values.items()):
        _sort(file, place, value)
    _precision(file)
    _optimizer(file)
    _schedule(file)
    file.problems += file.unknown
    return file


def _collect(file: DeepSpeedFile, section: JsonObject, place: str, spelled: str) -> None:
    for key, value in section.items():
        if key.startswith("_"):
            continue  # people's comments
        name = spelled + key
        where = RENAMED.get(place + key, place + key)
        if where in SECTIONS:
            if isinstance(value, dict):
                _collect(file, value, f"{where}.", f"{name}.")
            elif value not in (None, AUTO):
                file.problems.append(f"{name} is {brief(value)}, but must be a JSON object")
        elif where not in KEYS:
            file.unknown.append(_unknown(name, place))
        elif value not in (None, AUTO):
            # cpu_offload and its like were switches
            if place + key != where and isinstance(value, bool) and where.endswith(".device"):
                value = "cpu" if value else "none"
            if file.values.setdefault(where, value) != value:
                file.problems.append(f"{name} and {file.spelled[where]} differ: remove one")
            file.spelled.setdefault(where, name)


def _unknown(name: str, place: str) -> str:
    known = [key.removeprefix(place) for key in KEYS if key.startswith(place)]
    close = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    return f"unknown key {brief(name, 60)[1:-1]}" + (
        f" (did you mean {close[0]}?)" if close else ""
    )


def _sort(file: DeepSpeedFile, place: str, value: Any) -> None:
    key, name = KEYS[place], file.spelled[place]
    fits, words = KINDS[key.kind]
    if not fits(value):
        file.problems.append(f"{name} is {brief(value)}, but must be {words}")
        del file.values[place]
        return
    if key.kind in ("count", "even", "size", "power"):
        value = int(value)  # people write 5e8
    if key.fate == "adopted" and key.field:
        file.say(key.field, place, _ours(key.field, value))
    elif key.fate == "passed":
        *sections, last = place.split(".")
        target = file.passed
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    elif key.fate == "refused" and not key.is_harmless(value):
        file.problems.append(f"{name} {brief(value)}: {key.why}")
    elif key.fate == "idle" and not key.is_harmless(value):
        file.idle.append(f"{name} ({key.why})" if key.why else name)


def _ours(name: str, value: Any) -> Any:
    """Convert a JSON value to the type of the field `name` of RunConfig."""
    if name == "betas":
        return tuple(map(float, value))
    if name == "nvme_path":
        return Path(value)
    numbers = ("clip", "lr", "eps", "weight_decay", "momentum", "offload_fraction")
    return float(value) if name in numbers else value


def _precision(file: DeepSpeedFile) -> None:
    enabled = [name for name in ("bf16", "fp16") if file.values.get(f"{name}.enabled")]
    if len(enabled) > 1:
        file.problems.append(
            f"{' and '.join(f'{e}.enabled' for e in enabled)} are both true: keep one"
        )
        return
    for section in enabled:
        switches = {
            precision: [f"{section}.{switch}" for switch in known.switches]
            for precision, known in PRECISIONS.items()
            if known.computed == section and not known.fp8_linears
        }
        for names in switches.values():
            if len({bool(file.values.get(name)) for name in names}) > 1:
                file.problems.append(f"{' and '.join(names)} go together here: set both")
        # The last that fits: precisions with switches are listed behind the plain one.
        *_, asked = (p for p, names in switches.items() if all(map(file.values.get, names)))
        # --precision bf16-pure contradicts no file that has none of its switches
        also = (p for p, names in switches.items() if names and not file.values.keys() & {*names})
        file.say("precision", f"{section}.enabled", asked, also=tuple(also))


def _optimizer(file: DeepSpeedFile) -> None:
    kind = file.values.get("optimizer.type")
    if kind is None:
        return
    name = kind.lower()
    coupled = file.values.get("optimizer.params.adam_w_mode") is False
    if name not in get_args(OptimizerName):
        file.unknown = [text for text in file.unknown if "optimizer.params." not in text]
        file.problems.append(
            f"optimizer.type {brief(kind)}: here it is Adam, AdamW or SGD, or remove it"
        )
    elif name == "adam" and not coupled:
        # DeepSpeed's "Adam" decays as AdamW does, unless told otherwise.
        file.say("optimizer", "optimizer.type", "adamw", f"{brief(kind)} (decaying as AdamW)")
    else:
        file.say("optimizer", "optimizer.type", name)
        if name != "adam" and coupled:
            file.idle.append("optimizer.params.adam_w_mode (for Adam only)")


def _schedule(file: DeepSpeedFile) -> None:
    kind = file.values.get("scheduler.type")
    said = {
        name.rpartition(".")[2]: value
        for name, value in file.values.items()
        if name.startswith("scheduler.params.")
    }
    if kind is None:
        return
    if kind not in SCHEDULES:
        file.unknown = [text for text in file.unknown if "scheduler.params." not in text]
        file.problems.append(
            f"scheduler.type {brief(kind)}: it must be one of {', '.join(SCHEDULES)}, or remove it"
        )
        return
    # its lengths are auto or left out
    if not said.keys() & {"warmup_num_steps", "total_num_steps", "cos_min_ratio"}:
        file.idle.append(f"scheduler {kind} (--warmup-steps, --min-lr-ratio)")
        return
    schedule, end = SCHEDULES[kind]
    # "log" is DeepSpeed's default
    if "warmup_num_steps" in said and said.get("warmup_type", "log") != "linear":
        file.problems.append('scheduler.params.warmup_type "log" (or none): write "linear"')
    if "total_num_steps" in said:
        file.say("steps", "scheduler.params.total_num_steps", int(said["total_num_steps"]))
    file.say("schedule", "scheduler.type", schedule, brief(kind))
    ratio = float(said.get("cos_min_ratio", end))
    file.say("min_lr_ratio", "scheduler.type", ratio, f"{brief(kind)} (to {ratio:g} of the rate)")
