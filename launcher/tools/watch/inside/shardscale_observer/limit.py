"""The number of steps after which a rehearsal has seen what a training needs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from shardscale_observer.reading import alive, recurrent_networks

_MOST = 5
"""A rehearsal takes at most as many times its steps for optimizers that step rarely or anew."""


class Limit:
    """Ends after `steps` of each optimizer, and once every optimizer has stepped: one of a GAN's
    may do so in every fifth iteration only. None: never.

    A program may train in stages, one optimizer after another, so a new one has a step more beside
    its states. An older one that does not step in `steps` of all from then on belongs to a stage
    that is over.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waits_for: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that were made after others had stepped, for the next stage."""
        self._since = 0
        self._before: set[frozenset[int]] = set()
        self.turns: set[frozenset[int]] = set()
        """Optimizers that are alive and have stepped since the newest one did, by steps: one
        element, unless they step in turn, as a GAN's."""

    def step_ends(self, step: int, stepping: set[int], optimizers: Any) -> None:
        """Note which optimizers have stepped in this step, by their ids."""
        new = [one for one in optimizers if one not in self._known and id(one) in stepping]
        if new:
            self._known.update(new)
            self._since, self.turns, self._before = step, set(), self._before | self.turns
        self.turns = alive({*self.turns, frozenset(stepping)}, optimizers)
        self._before = alive(self._before - self.turns, optimizers)

    def is_reached(self, recorder: Any) -> bool:
        """Return True if no more steps need to be recorded."""
        if self._steps is None:
            return False
        turns = max(1, len(self.turns | self._before))
        # a round more beside the states that the newest optimizer has made
        more = self._steps * turns if self._before else turns
        if recorder.steps >= _MOST * self._steps * turns:
            return True
        least = max(self._steps * turns, self._since + more)
        if recorder.steps < least or any(one not in self._known for one in self.waits_for):
            return False
        return not unstepped(recorder)


def making(init: Callable[..., None], report: Callable[[Any], object]) -> Callable[..., None]:
    """Return an optimizer's `__init__` that reports what it has made."""

    @functools.wraps(init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        report(self)

    return make


def unseen(recorder: Any) -> dict[str, Any]:
    """Return what the steps of a rehearsal have not shown."""
    return {
        "unstepped": unstepped(recorder),
        "histories": list(_histories(recorder.optimizers)),
        "recurrent": recurrent_networks(),
    }


def _histories(optimizers: Any) -> Iterator[dict[str, Any]]:
    """Yield how many pairs of vectors each LBFGS will keep, and has: it gets some in every step."""
    for one in optimizers:
        pairs = one.param_groups[0].get("history_size")
        if isinstance(pairs, int):
            made = [len(state.get("old_dirs") or ()) for state in one.state.values()]
            size = sum(parameter.nbytes for parameter in _parameters([one]))
            kind = type(one).__name__
            yield {"kind": kind, "pairs": pairs, "made": sum(made), "bytes": 2 * pairs * size}


def unstepped(recorder: Any) -> list[dict[str, Any]]:
    """Return the kind and parameters of each optimizer that has not stepped, of those that no other
    one has."""
    optimizers = recorder.torch.optim.Optimizer
    known = set(map(id, _parameters(recorder.optimizers)))
    found = []
    for one in [one for one in gc.get_objects() if issubclass(type(one), optimizers)]:
        waiting = {
            id(parameter): parameter.numel()
            for parameter in _parameters([one])
            if parameter.requires_grad and parameter.is_cuda and id(parameter) not in known
        }
        if waiting:
            found.append({"kind": type(one).__name__, "parameters": sum(waiting.values())})
    return found


def _parameters(optimizers: Any) -> list[Any]:
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    return [parameter for group in groups for parameter in group["params"]]
