"""`--activation-checkpointing budget=8GiB`: activations that each block keeps, chosen before a run.

The budget counts what the blocks of one rank keep of one micro-batch: storages allocated in a
block's forward and alive at the end of the forward, its output included, by the same trace that
predicts the run (under autocast a block that keeps everything also keeps the casts of its weights).
Embeddings, the head and allocations of the backward do not count.

First, every block recomputes all of itself. The rest of the budget goes to the matrix products
that save the most FLOPs per byte, then to blocks that keep everything. The last blocks keep most:
during their backward all activations are still there, and they have nothing to recompute on top.
The choice follows from the config alone, so that all ranks agree.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.config.resolve import Resolved
from launcher.forecast.predict import traced
from launcher.forecast.trace.events import Allocated, MicroBatch
from launcher.forecast.work import block_flops
from launcher.model.checkpointing import PRODUCTS, keeping, spelled
from launcher.util.errors import UserError
from launcher.util.sizes import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Bytes that one block keeps of a micro-batch."""

    least: int
    """If it recomputes everything."""
    products: Mapping[str, int]
    """Added by each product that it keeps, alone."""
    together: int
    """Added by all of them."""
    most: int
    """If it keeps everything."""


def within_budget(resolved: Resolved) -> Resolved:
    """Return the run with each block's choice made, or unchanged without a budget.

    Raises:
        UserError: the budget is too small even for full recomputation.
    """
    budget_bytes = resolved.model.checkpointing.budget_bytes
    if budget_bytes is None:
        return resolved
    probe, layers = _probe(resolved), resolved.model.layers
    costs = _costs(probe)
    if budget_bytes < layers * costs.least:
        raise UserError(
            f"--activation-checkpointing {resolved.model.activation_checkpointing}: {layers} "
            f"blocks that recompute everything keep {gib(layers * costs.least)} of a micro-batch: "
            f"give at least budget={layers * costs.least}B, or a smaller --micro-batch"
        )
    blocks = spent(budget_bytes, layers, costs, _saved_flops(probe))
    return _with(resolved, spelled(blocks))


def spent(budget_bytes: int, layers: int, costs: Costs, flops: Mapping[str, float]) -> list[str]:
    """Spend a budget that is enough for full recomputation; returns each block's mode.

    Args:
        flops: of each product, by name.
    """
    left = budget_bytes - layers * costs.least
    # Attention with dropout keeps nothing, and is recomputed all the same.
    worth = [name for name in PRODUCTS if costs.products[name]]
    worth.sort(key=lambda name: -flops[name] / costs.products[name])
    each = dict(costs.products)
    # All together can take more than one by one: the last one is charged with the rest.
    each[worth[-1]] += max(0, costs.together - sum(each.values()))  # no more blocks keep all
    keepers = dict.fromkeys(PRODUCTS, 0)  # number of blocks that keep it: the last ones
    for name in worth:
        keepers[name] = min(layers, left // each[name])
        left -= keepers[name] * each[name]
    rest = costs.most - costs.least - sum(each.values())
    whole = min(keepers[name] for name in worth)
    if rest > 0:
        whole = min(whole, left // rest)
    recomputing = [
        keeping([name for name in PRODUCTS if keepers[name] >= layers - number])
        for number in range(layers - whole)
    ]
    return [*recomputing, *whole * ["none"]]


def kept_bytes(trace: MicroBatch) -> list[int]:
    """Return the bytes that each block keeps of a micro-batch."""
    return [
        sum(
            e.size_bytes for e in events if isinstance(e, Allocated) and e.category == "activations"
        )
        for place, events in trace.forward
        if place.part == "block"
    ]


def _probe(resolved: Resolved) -> Resolved:
    """The run with one block of each kind.

    A block's output is kept by the next block, always if that one recomputes itself. The first
    block does not count: beside frozen weights it keeps less, since its input has no gradient.
    """
    # Of the two "full" in a row the first is measured, behind which a block keeps its input.
    words = ["full", *(keeping([name]) for name in PRODUCTS), "selective", *2 * ["full"], "none"]
    model = dataclasses.replace(
        resolved.model, layers=len(words), activation_checkpointing=spelled(words)
    )
    return dataclasses.replace(resolved, model=model)


def _saved_flops(probe: Resolved) -> dict[str, float]:
    """FLOPs that keeping each product saves a block's backward."""
    _, *products, _, least, _, _ = block_flops(probe)
    return {name: least - flops for name, flops in zip(PRODUCTS, products, strict=True)}


def _costs(probe: Resolved) -> Costs:
    trace = traced(probe)
    _, *products, together, least, _, most = kept_bytes(trace)
    each = {name: size - least for name, size in zip(PRODUCTS, products, strict=True)}
    return Costs(least=least, products=each, together=together - least, most=most)


def _with(resolved: Resolved, text: str) -> Resolved:
    model = dataclasses.replace(resolved.model, activation_checkpointing=text)
    return dataclasses.replace(resolved, model=model)
