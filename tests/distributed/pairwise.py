"""Few combinations in which every two values of every two dimensions meet at least once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Choice = dict[str, str]
"""Dimension -> one of its values."""


def all_pairs(
    dimensions: Mapping[str, Sequence[str]],
    *,
    allowed: Callable[[Choice], bool],
    weak: frozenset[str] = frozenset(),
) -> list[Choice]:
    """Combinations that contain every allowed pair of values of two dimensions.

    Greedy, and the same each time: a combination begins with the first pair that is missing, and
    takes from every other dimension the allowed value that adds most missing pairs; of equal ones
    the first, so that defaults stand first. A pair is not allowed if it is not beside any value of
    the first dimension and the defaults of all others.

    `weak` values, such as a low precision, blur what a combination can show. It then counts only
    for the pairs of its weak value, and has no second one.
    """
    values = [(name, value) for name, listed in dimensions.items() for value in listed]
    missing = {
        _pair(one, other): None
        for one, other in combinations(values, 2)
        if one[0] != other[0] and not weak >= {one[1], other[1]}
    }
    found = []
    while missing:
        seed = next(iter(missing))
        choice = _first_allowed(dict(seed), dimensions, allowed)
        if choice is None:
            del missing[seed]
            continue
        blurred = not weak.isdisjoint(choice.values())
        taken = dict(seed)
        for name in [name for name in dimensions if name not in taken]:
            gains: dict[str, int] = {}
            for value in dimensions[name]:
                if value not in weak:
                    partners = [p for p in taken.items() if not blurred or p[1] in weak]
                    gains[value] = sum(_pair((name, value), p) in missing for p in partners)
            for value in sorted(gains, key=gains.__getitem__, reverse=True):
                if value == choice[name] or allowed({**choice, name: value}):
                    taken[name] = choice[name] = value
                    break
        for pair in combinations(choice.items(), 2):
            if not blurred or not weak.isdisjoint(value for _, value in pair):
                missing.pop(_pair(*pair), None)
        found.append(choice)
    return found


def _pair(one: tuple[str, str], other: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return (one, other) if one <= other else (other, one)


def _first_allowed(
    pair: Choice,
    dimensions: Mapping[str, Sequence[str]],
    allowed: Callable[[Choice], bool],
) -> Choice | None:
    """The pair beside defaults, or beside another value of the first dimension."""
    first = next(iter(dimensions))
    defaults = {name: values[0] for name, values in dimensions.items()}
    for value in [pair[first]] if first in pair else dimensions[first]:
        choice = {**defaults, first: value, **pair}
        if allowed(choice):
            return choice
    return None
