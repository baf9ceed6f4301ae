"""Trace the allocations and frees of one micro-batch by running the real model without memory.

The model runs under FakeTensorMode, followed by the tracker that also measures
(`launcher.measure.live_trace`), so that a predicted byte and a measured byte mean the same.

The events are cut into segments: the embedding, each block, the head, and the same backwards.
Blocks repeat, so few are traced: the first, the last, and one between that stands for any number,
or one for each way of checkpointing among its neighbours. Beside frozen weights the first differs,
whose input has no gradient, and so may those next to it. Nothing here depends on how the model is
sharded.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter

from launcher.forecast.trace.events import (
    Allocated,
    AllocationId,
    Event,
    Freed,
    Gradient,
    Key,
    MicroBatch,
    Module,
    Place,
    Segment,
    Trace,
    TraceRequest,
)
from launcher.forecast.trace.foreign import block_kinds, with_blocks
from launcher.forecast.trace.micro_batches import trace_of, work_of
from launcher.forecast.trace.stored import stored_trace, stored_work
from launcher.forecast.trace.work import NO_WORK, Work
from launcher.model.checkpointing import spelled
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.parts import block_of, in_block
from launcher.util.sizes import page_locked_bytes

_NEIGHBOURS = 2
"""On each side of a block that its events may depend on: a gradient that is accumulated behind the
block's own begin is among the next one's, and numbered as that one's are."""


@cache
def trace_micro_batch(asked: TraceRequest) -> MicroBatch:
    """The events of one forward and backward; cached."""
    few, traced, representatives = shallow(asked.model)
    of_few = asked._replace(model=few)
    return _expanded(stored_trace(of_few) or trace_of(of_few), traced, representatives)


def micro_batch_work(asked: TraceRequest) -> dict[Place, Work]:
    """Work of each segment of the same micro-batch; what a block recomputes is in its backward."""
    of_few, representatives = _work_of_few(asked)
    return {
        instance: work
        for place, work in of_few.items()
        for instance in _instances(place, representatives)
    }


@cache
def pass_work(asked: TraceRequest) -> tuple[Work, Work]:
    """Work of the whole forward and of the whole backward."""
    of_few, representatives = _work_of_few(asked)
    layers = Counter(representatives)
    forward = backward = NO_WORK
    for place, work in of_few.items():
        times = layers[place.layer] if place.part.startswith("block") else 1
        if place.part.endswith("backward"):
            backward = backward.plus(work, times=times)
        else:
            forward = forward.plus(work, times=times)
    return forward, backward


def _work_of_few(asked: TraceRequest) -> tuple[dict[Place, Work], list[int]]:
    """Return the work of a shallow model, and for each block the one that represents it."""
    few, _, representatives = shallow(asked.model)
    of_few = asked._replace(model=few)
    return stored_work(of_few) or work_of(of_few), representatives


def shallow(model: ModelConfig) -> tuple[ModelConfig, list[int], list[int]]:
    """Return a model of representative blocks, the numbers that they have in the deep model, and
    for each block of that one the block that represents it."""
    words = model.checkpointing.blocks(model.layers)
    # Blocks of one kind between blocks of the same kinds have the same events.
    kinds = [*words]
    if model.lora is not None:
        kinds[0] += ", input without gradient"
    if isinstance(model, ForeignConfig):  # its blocks may differ
        kinds = [f"{kind}, {own}" for kind, own in zip(kinds, block_kinds(model), strict=True)]
    traced, representatives = _representative_blocks(kinds)
    spelling = spelled([words[n] for n in traced])
    if not isinstance(model, ForeignConfig):
        few = replace(model, layers=len(traced), activation_checkpointing=spelling)
        return few, traced, representatives
    plain = replace(model, activation_checkpointing="none")
    # A router loss computes with all blocks' routers at once.
    theirs = None if model.router_loss else with_blocks(plain, traced)
    if theirs is None:
        return model, [*range(model.layers)], [*range(model.layers)]
    return replace(theirs, activation_checkpointing=spelling), traced, representatives


def _representative_blocks(kinds: Sequence[str]) -> tuple[list[int], list[int]]:
    """Blocks of a deep model that make a shallow one in which each of its blocks has one that
    stands for it, with the same neighbours; and for every block, which of them that is."""
    last = len(kinds) - 1
    padded = [*_NEIGHBOURS * [kinds[0]], *kinds, *_NEIGHBOURS * [kinds[-1]]]
    # what decides a block's events: its place at an end, its kind, its neighbours' kinds
    around = [(n == 0, n == last, *padded[n : n + 2 * _NEIGHBOURS + 1]) for n in range(len(kinds))]
    few: list[int] = []
    among: Counter[tuple[object, ...]] = Counter()
    for number, here in enumerate(around):
        if among[here]:
            # Back where it was before: what came since is left out, unless it is nowhere else.
            before = max(place for place, n in enumerate(few) if around[n] == here)
            since = Counter(around[n] for n in few[before + 1 :])
            if all(among[kind] > count for kind, count in since.items()):
                del few[before + 1 :]
                among -= since
                continue
        few.append(number)
        among[here] += 1
    place_of = {around[n]: place for place, n in enumerate(few)}
    return few, [place_of[here] for here in around]


def on_host(trace: MicroBatch) -> MicroBatch:
    """The same micro-batch under `--activation-checkpointing offload` on a GPU: the blocks' saved
    inputs are on the host until they are fetched.

    The trace runs on a CPU, where the copies that model/offload.py makes are in the same memory as
    everything else. On a GPU they are in page-locked host memory, whose blocks torch rounds up to
    powers of two (CachingHostAllocator). Each comes back as the backward of the block after it
    begins, so that two are on the device at a time.
    """
    inputs = _inputs(trace)
    away = {allocated.key for allocated in inputs.values()}
    forward = [
        (place, [_to_host(e) if isinstance(e, Allocated) and e.key in away else e for e in events])
        for place, events in trace.forward
    ]
    fetched = {  # under keys that the trace does not have
        layer: allocated._replace(key=-1 - layer, category="temporary")
        for layer, allocated in inputs.items()
    }
    backward: list[Segment] = []
    for place, events in trace.backward:
        if place.part == "block_backward":
            arriving = [place.layer - 1] if place.layer else []
            # a block's backward fetches the input of the one before; the last block's, its own too
            if place.layer == max(inputs):
                arriving.insert(0, place.layer)
            key = inputs[place.layer].key
            end = next(n for n, e in enumerate(events) if isinstance(e, Freed) and e.key == key)
            freed = Freed(fetched[place.layer].key)
            events = [*(fetched[n] for n in arriving), *events[:end], freed, *events[end:]]
        backward.append((place, events))
    return replace(trace, forward=forward, backward=backward)


def _expanded(trace: Trace, traced: Sequence[int], representatives: Sequence[int]) -> MicroBatch:
    """Put a deep model's events in order, each block's as those of the traced one in its place."""
    layers = len(representatives)
    places = _places(layers)
    events: dict[Place, list[tuple[int, Event]]] = {place: [] for place in places}
    keys: dict[AllocationId, Key] = {}
    left: set[Key] = set()
    instances = cache(lambda place: _instances(place, representatives))
    relative = cache(partial(_relative, traced=traced))

    @cache
    def renamed(name: str, template: Place, instance: Place) -> str:
        """Name a parameter or module, which may be of a neighbour, as `instance` sees it."""
        block = block_of(name)
        if block is None:
            return name
        return in_block(name, relative(Place("block", block), template, instance).layer)

    for lifetime in trace.lifetimes:
        template, number = lifetime.allocation
        category = "activations" if lifetime.saved else "temporary"
        for place in instances(template):
            key = keys[place, number] = len(keys)
            events[place].append((lifetime.at, Allocated(key, lifetime.size_bytes, category)))
            if lifetime.end is None:
                left.add(key)
            else:
                end = relative(lifetime.end[0], template, place)
                events[end].append((lifetime.end[1], Freed(key)))
    for parameter, allocation, where, at in trace.gradients:
        for place in instances(where):
            key = keys[relative(allocation[0], where, place), allocation[1]]
            left.discard(key)  # whether a gradient lives on is the strategy's matter
            events[place].append((at, Gradient(key, renamed(parameter, where, place))))
    for mark, where, at in trace.marks:
        for place in instances(where):
            own = mark
            if isinstance(mark, Module):
                own = mark._replace(name=renamed(mark.name, where, place))
            events[place].append((at, own))
    ordered = [
        (place, [event for _, event in sorted(events[place], key=itemgetter(0))])
        for place in places
    ]
    return MicroBatch(
        forward=ordered[: layers + 2], backward=ordered[layers + 2 :], left=sorted(left)
    )


def _places(layers: int) -> list[Place]:
    blocks = [Place("block", layer) for layer in range(layers)]
    backward = [Place("block_backward", layer) for layer in reversed(range(layers))]
    forward = [Place("embed"), *blocks, Place("head")]
    return [*forward, Place("head_backward"), *backward, Place("embed_backward")]


def _instances(place: Place, representatives: Sequence[int]) -> list[Place]:
    """List where in the deep model a segment of the traced one is."""
    if not place.part.startswith("block"):
        return [place]
    deep = enumerate(representatives)
    return [Place(place.part, layer) for layer, few in deep if few == place.layer]


def _relative(other: Place, template: Place, instance: Place, traced: Sequence[int]) -> Place:
    """The segment that `other` is, seen from an instance of `template`."""
    if not other.part.startswith("block"):
        return other
    if template.part.startswith("block"):
        return Place(other.part, instance.layer + other.layer - template.layer)  # same distance
    return Place(other.part, traced[other.layer])


def _inputs(trace: MicroBatch) -> dict[int, Allocated]:
    """Return what each block has saved: the first that is allocated in its forward and freed in its
    own backward. A norm without parameters behind the last block is recorded in that, too; torch
    2.11 saves an empty tensor beside each input."""
    freed: dict[Key, int] = {
        event.key: place.layer
        for place, events in trace.backward
        for event in events
        if isinstance(event, Freed) and place.part == "block_backward"
    }
    return {
        place.layer: event
        for place, events in trace.forward
        # reversed, so that a block's first such event is the one that stays in the dict
        for event in reversed(events)
        if isinstance(event, Allocated)
        and place.part == "block"
        and freed.get(event.key) == place.layer
        and event.size_bytes
    }


def _to_host(allocated: Allocated) -> Allocated:
    size_bytes = page_locked_bytes(allocated.size_bytes)
    return allocated._replace(size_bytes=size_bytes, where="host")
