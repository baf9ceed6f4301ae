"""What a checkpoint must hold, by the optimizer that its own run says it has."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.optim.choice import OptimChoice
from launcher.optim.registry import OPTIMIZERS, checkpointed
from launcher.strategies.flat_shards import PARAM, OwnShapes


def what_is_missing(
    *,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Sequence[str],
    own_shapes: OwnShapes,
    counters: Mapping[str, float],
    config: Mapping[str, Any],
) -> str | None:
    """The first state or counter that is not there, None where all are.

    The ranges are checked against `kinds` and `shapes` elsewhere; here those are checked against
    what the optimizer of `config` (a run's flat config) keeps, which the engine had no part in.
    """
    if config.get("optimizer") not in OPTIMIZERS:
        return None
    choice = OptimChoice(optimizer=config["optimizer"], momentum=config.get("momentum", 0))
    states, wanted_counters = checkpointed(choice)
    elementwise = OPTIMIZERS[choice.optimizer].elementwise
    for name in shapes:
        found = {kind for kind in kinds if name in own_shapes.get(kind, shapes)}
        missing = [kind for kind in (PARAM, *states) if kind not in found]
        # Of Adafactor's factors a parameter has those that fit its shape.
        factored = not elementwise and PARAM not in missing and len(missing) < len(states)
        if missing and not factored:
            return f"has no {missing[0]} of {name}"
    for counter in wanted_counters:
        if counter not in counters:
            return f"has no counter {counter} of the optimizer"
    return None
