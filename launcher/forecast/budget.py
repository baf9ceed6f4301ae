"""`--activation-checkpointing budget=8GiB`: what each block keeps, decided before a run.

The budget is of what the blocks of one rank keep of one micro-batch: bytes of the storages that
are born in a block's forward and alive when the forward ends, each block's output among them, by
the same trace that predicts the run (under autocast a block that keeps everything keeps its
weights' casts, too). Embeddings, the head and what is born in the backward are not in it.

Every block recomputes all of itself, first. What is left is spent on the products that save the
most FLOPs for a byte, then on blocks that keep everything. The last blocks keep most: while they
run backwards everything is still there, and they have nothing to recompute beside it. The choice
follows from the config alone, so that all ranks come to the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.config.resolve import Resolved
from launcher.forecast.predict import traced
from launcher.forecast.trace.events import Born, MicroBatch
from launcher.forecast.work import product_flops
from launcher.model.checkpointing import PRODUCTS, keeping, spelled
from launcher.util.errors import UserError
from launcher.util.sizes import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes that one block keeps of a micro-batch."""

    least: int
    """Where it recomputes everything."""
    products: Mapping[str, int]
    """What each product adds to that, where it is kept."""
    most: int
    """Where it keeps everything."""


def within_budget(resolved: Resolved, *, world_size: int) -> Resolved:
    """The same run with every block's choice made; as it is where no budget is given.

    Raises:
        UserError: not even blocks that recompute everything keep so little.
    """
    budget_bytes = resolved.model.checkpointing.budget_bytes
    if budget_bytes is None:
        return resolved
    costs, layers = _costs(resolved, world_size), resolved.model.layers
    if budget_bytes < layers * costs.least:
        raise UserError(
            f"--activation-checkpointing {resolved.model.activation_checkpointing}: {layers} "
            f"blocks that recompute everything keep {gib(layers * costs.least)} of a micro-batch: "
            f"give at least budget={layers * costs.least}B, or a smaller --micro-batch"
        )
    blocks = spent(budget_bytes, layers, costs, product_flops(resolved))
    return _with(resolved, spelled(blocks))


def within_budgets(runs: Sequence[Resolved], *, world_size: int) -> tuple[Resolved, ...]:
    """The same for runs by growing micro-batch: as many as the budget is enough for.

    Raises:
        UserError: it is not for the first.
    """
    found = [within_budget(runs[0], world_size=world_size)]
    for run in runs[1:]:
        try:
            found.append(within_budget(run, world_size=world_size))
        except UserError:
            break
    return tuple(found)


def spent(budget_bytes: int, layers: int, costs: Costs, flops: Mapping[str, float]) -> list[str]:
    """Each block's word. The budget is enough for all that recompute everything.

    Args:
        flops: of each product, by name.
    """
    left = budget_bytes - layers * costs.least
    # Attention that draws numbers keeps nothing, and is recomputed all the same.
    worth = [name for name in PRODUCTS if costs.products[name]]
    worth.sort(key=lambda name: -flops[name] / costs.products[name])
    keepers = dict.fromkeys(PRODUCTS, 0)  # how many blocks keep it: the last so many
    for name in worth:
        keepers[name] = min(layers, left // costs.products[name])
        left -= keepers[name] * costs.products[name]
    rest = costs.most - costs.least - sum(costs.products.values())
    whole = min(keepers[name] for name in worth)
    if rest > 0:
        whole = min(whole, left // rest)
    recomputing = [
        keeping([name for name in PRODUCTS if keepers[name] >= layers - number])
        for number in range(layers - whole)
    ]
    return [*recomputing, *whole * ["none"]]


def kept_bytes(trace: MicroBatch) -> list[int]:
    """What each block keeps of a micro-batch."""
    return [
        sum(e.size_bytes for e in events if isinstance(e, Born) and e.category == "activations")
        for place, events in trace.forward
        if place.part == "block"
    ]


def _costs(resolved: Resolved, world_size: int) -> Costs:
    """By a trace of one block of each kind.

    A block's output is kept by what comes next, if it is: where that recomputes itself, always.
    The first is not looked at: beside frozen weights it keeps less, of what has no gradient.
    """
    words = ["full", *(keeping([name]) for name in PRODUCTS), "full", "full", "none"]
    model = dataclasses.replace(
        resolved.model, layers=len(words), activation_checkpointing=spelled(words)
    )
    probe = dataclasses.replace(resolved, model=model)
    trace = traced(probe, world_size=world_size, device_type=resolved.config.loop.device)
    _, *products, least, _, most = kept_bytes(trace)
    each = {name: size - least for name, size in zip(PRODUCTS, products, strict=True)}
    return Costs(least=least, products=each, most=most)


def _with(resolved: Resolved, text: str) -> Resolved:
    model = dataclasses.replace(resolved.model, activation_checkpointing=text)
    return dataclasses.replace(resolved, model=model)
