"""What one micro-batch allocates and frees, from running the real model without memory.

The model runs under FakeTensorMode, followed by the tracker that also measures
(`launcher.memory.live_trace`), so that a predicted byte and a measured byte mean the same.

The events are cut into segments: the embedding, each block, the head, and the same backwards.
Blocks repeat, so three are traced, and the middle one stands for any number; sizes are linear in
the micro-batch, so two of them give the rest. Only the loss, which may work in chunks, is traced
at the batch itself, behind a single block. Nothing here depends on how the model is sharded.
"""

from dataclasses import replace
from functools import cache

from launcher.memory.timeline import Tag
from launcher.memory.trace_events import (
    Birth,
    Born,
    Compute,
    Event,
    Freed,
    Gradient,
    Key,
    MicroBatch,
    Place,
    Trace,
)
from launcher.memory.trace_record import record_trace
from launcher.model.config import ModelConfig

# A dimension of size one is contiguous in any order, so a batch of one copies less than others.
_BATCHES = (2, 3)
_LAYERS = 3


@cache
def trace_micro_batch(
    model: ModelConfig, compute: Compute, *, micro_batch: int, seq_len: int
) -> MicroBatch:
    """The events of one forward and backward of [micro_batch, seq_len] tokens; cached."""
    layers = min(model.layers, _LAYERS)
    body = _body(replace(model, layers=layers), compute, micro_batch, seq_len)
    if micro_batch not in _BATCHES and micro_batch > 1:
        body = _with_head(
            body, record_trace(replace(model, layers=1), compute, micro_batch, seq_len)
        )
    return _deepened(body, model.layers)


def _body(model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int) -> Trace:
    if micro_batch == 1 or micro_batch in _BATCHES:
        return record_trace(model, compute, micro_batch, seq_len)
    # Chunks of the loss come and go with the batch; it is replaced anyway.
    model = replace(model, loss_chunk=0)
    low, high = (record_trace(model, compute, batch, seq_len) for batch in _BATCHES)
    lives = {}
    for birth, life in low.lives.items():
        other = high.lives[birth]
        size, *shape = (
            a + (b - a) * (micro_batch - _BATCHES[0])
            for a, b in zip(
                (life.size_bytes, *life.shape), (other.size_bytes, *other.shape), strict=True
            )
        )
        lives[birth] = replace(life, size_bytes=size, shape=tuple(shape))
    return Trace(low.layers, lives, low.gradients, low.modules)


def _with_head(body: Trace, one: Trace) -> Trace:
    """`body` with the head of a model of one layer."""
    last = body.layers - 1
    in_head = ("head", "head_backward")

    def moved(end: tuple[Place, int] | None) -> tuple[Place, int] | None:
        return None if end is None else (_at_layer(end[0], last), end[1])

    lives = {}
    for key, life in body.lives.items():
        if key[0].part in in_head:
            continue
        if life.end is not None and life.end[0].part in in_head:
            same = one.lives[Place(key[0].part), key[1]]
            life = replace(life, end=same.end)
        lives[key] = life
    for key, life in one.lives.items():
        if key[0].part in in_head:
            lives[key] = replace(life, end=moved(life.end))
    gradients = [entry for entry in body.gradients if entry[2].part not in in_head]
    gradients += [entry for entry in one.gradients if entry[2].part in in_head]
    modules = [entry for entry in body.modules if entry[1].part not in in_head]
    modules += [entry for entry in one.modules if entry[1].part in in_head]
    return Trace(body.layers, lives, gradients, modules)


def _at_layer(place: Place, layer: int) -> Place:
    return replace(place, layer=layer) if place.part.startswith("block") else place


def _deepened(trace: Trace, layers: int) -> MicroBatch:
    """Repeat the middle block until there are `layers`, and put all events in order."""
    places = _places(layers)
    events: dict[Place, list[tuple[int, Event]]] = {place: [] for place in places}
    keys: dict[Birth, Key] = {}
    left: set[Key] = set()
    for life in trace.lives.values():
        template, number = life.birth
        category = "activations" if life.saved else "temporary"
        for place in _instances(template, trace.layers, layers):
            key = keys[place, number] = len(keys)
            tag = Tag(category, _renamed(life.module, template, place), life.shape, life.dtype)
            events[place].append((life.at, Born(key, life.size_bytes, tag)))
            if life.end is None:
                left.add(key)
            else:
                end = _relative(life.end[0], template, place, trace.layers, layers)
                events[end].append((life.end[1], Freed(key)))
    for parameter, birth, where, at in trace.gradients:
        for place in _instances(where, trace.layers, layers):
            born_in = _relative(birth[0], where, place, trace.layers, layers)
            key = keys[born_in, birth[1]]
            left.discard(key)
            events[place].append((at, Gradient(key, _renamed(parameter, where, place))))
    for module, where, at in trace.modules:
        for place in _instances(where, trace.layers, layers):
            name = _renamed(module.name, where, place)
            events[place].append((at, replace(module, name=name)))
    ordered = [
        (place, [event for _, event in sorted(events[place], key=lambda entry: entry[0])])
        for place in places
    ]
    return MicroBatch(
        forward=ordered[: layers + 2], backward=ordered[layers + 2 :], left=sorted(left)
    )


def _renamed(name: str, template: Place, instance: Place) -> str:
    prefix = f"blocks.{template.layer}"
    if name == prefix or name.startswith(prefix + "."):
        return f"blocks.{instance.layer}{name.removeprefix(prefix)}"
    return name


def _places(layers: int) -> list[Place]:
    blocks = [Place("block", layer) for layer in range(layers)]
    backward = [Place("block_backward", layer) for layer in reversed(range(layers))]
    forward = [Place("embed"), *blocks, Place("head")]
    return [*forward, Place("head_backward"), *backward, Place("embed_backward")]


def _instances(place: Place, traced: int, layers: int) -> list[Place]:
    """Where in the deep model a segment of the traced one is."""
    if not place.part.startswith("block") or traced == layers or place.layer == 0:
        return [place]
    if place.layer == traced - 1:
        return [replace(place, layer=layers - 1)]
    return [replace(place, layer=layer) for layer in range(1, layers - 1)]


def _relative(other: Place, template: Place, instance: Place, traced: int, layers: int) -> Place:
    """The segment that `other` is, seen from an instance of `template`."""
    if not other.part.startswith("block"):
        return other
    if template.part.startswith("block"):
        return replace(other, layer=instance.layer + other.layer - template.layer)
    return replace(other, layer=layers - 1 if other.layer == traced - 1 else other.layer)
