"""One trainer's keys as data: their name, what it is here, and what has no effect on bytes."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

Facts = dict[str, Any]
"""Fields of RunConfig, and the facts of `translate.py` (gpus, accumulation, mixed, weights ...)."""
Flat = Mapping[str, Any]
"""Keys of a file, with dots between levels."""
Reader = Callable[[Any], Facts]
"""Turn a value into facts; raises `Unknown` where it has no counterpart."""
Keys = Mapping[str, Reader | str | None]
"""Key -> its reader, the reason why it bears on bytes and is not planned, or None where it has no
effect on bytes. Without a reader, a section stands for all keys in it, and without effect `*` for
any text."""
OFF: Final = (None, False, 0, "", "none", "no", "NO", "auto", "false", "False")
MOST_VALUE: Final = 10**9


class Unknown(Exception):
    """A value without a counterpart; the message says what is planned instead, by `facts`."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts


class Kind(NamedTuple):
    """A trainer whose configs are read."""

    name: str
    engine: str
    """Row of `engines.ENGINES`."""
    marks: str
    """Keys that only its files have, between spaces: a file is of the kind of which it has most."""
    keys: Keys
    defaults: Facts = {}  # noqa: RUF012
    changes: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(what it does, key -> value) of edits that need less memory, mildest first."""
    micro_batch: str = ""
    """Key of the micro-batch, and of the accumulation that makes up for a smaller one."""
    accumulation: str = ""

    def reader(self, key: str) -> Reader | None:
        """Return the reader of a key that is planned."""
        found = self.keys.get(key)
        return found if callable(found) else None

    def reason(self, key: str) -> str | None:
        """Return which key or section is not planned, and why; None for others."""
        found = ((place, self.keys.get(place)) for place in _places(key))
        return next((f"{place}: {why}" for place, why in found if isinstance(why, str)), None)

    def has_no_effect(self, key: str) -> bool:
        """Return whether a key or the section that it is in has no effect on bytes."""
        names = [name for name, entry in self.keys.items() if entry is None]
        return any(fnmatchcase(place, name) for place in _places(key) for name in names)


def _places(key: str) -> list[str]:
    """Return the sections that a key is in, the outermost first, and the key."""
    return [key[:end] for end, letter in enumerate(f"{key}.") if letter == "."]


def no_effect(names: str) -> Keys:
    """Return entries of keys without effect on bytes, between spaces."""
    return dict.fromkeys(names.split())


def under(prefixes: str, keys: Keys) -> Keys:
    """Return keys behind each of some prefixes, between spaces."""
    return {prefix + name: entry for prefix in prefixes.split() for name, entry in keys.items()}


def whole(fact: str, *, unset: int | None = None) -> Reader:
    """Read a whole number above 0, or `unset`, which says nothing; raises ValueError for others."""

    def read(value: Any) -> Facts:
        # DeepSpeed files for transformers say auto: the trainer fills it in
        if value is None or str(value).strip().lower() in ("auto", "", "none", "null"):
            return {}
        number = number_of(value)
        if number is not None and number == unset:
            return {}
        if number is None or number != int(number) or not 0 < number <= MOST_VALUE:
            raise ValueError("is no whole number above 0")
        return {fact: int(number)}

    return read


def text(fact: str) -> Reader:
    """Read any text."""
    return lambda value: {} if value in OFF else {fact: str(value)}


def when(**facts: Any) -> Reader:
    """Take `facts` where a switch is on."""
    return lambda value: dict(facts) if is_on(value) else {}


def switch(fact: str, on: Any = True, off: Any = False) -> Reader:
    """Read a switch that says something where it is off, too."""
    return lambda value: {fact: on if is_on(value) else off}


def words(
    table: Mapping[str, Facts], *, otherwise: str = "is not planned", **instead: Any
) -> Reader:
    """Read one of a few words, in any capitals; another one is planned as `instead`."""
    lower = {name.lower(): facts for name, facts in table.items()}

    def read(value: Any) -> Facts:
        name = str(value).strip().lower()
        # torch.optim.AdamW, ShardingStrategy.FULL_SHARD: the last part is the word
        name = name if name in lower else name.rpartition(".")[2]
        if name not in lower:
            if value in OFF:
                return {}
            raise Unknown(otherwise, **instead)
        return dict(lower[name])

    return read


def alike(names: str, **facts: Any) -> dict[str, Facts]:
    """Return the same facts for several words, between spaces."""
    return {name: dict(facts) for name in names.split()}


def verbatim(names: str, fact: str) -> dict[str, Facts]:
    """Return facts of words, between spaces, that are the same here."""
    return {name: {fact: name} for name in names.split()}


def is_on(value: Any) -> bool:
    """Return whether a switch is on, as YAML, JSON or a flag spell it."""
    return str(value).strip().lower() not in ("", "none", "false", "no", "off", "0", "null", "auto")


def number_of(value: Any) -> float | None:
    """Return a number, also one that is text (`5e8` is text in YAML 1.1), or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value) if len(str(value)) <= 30 else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < float("inf") else None
