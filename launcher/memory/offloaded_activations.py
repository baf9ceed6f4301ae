"""`--activation-checkpointing offload` on a GPU: block inputs wait in host memory.

The trace runs on a CPU, where the copies that model/offload.py makes are in the same memory as
everything else. On a GPU they are in page-locked host memory, whose blocks torch rounds up to
powers of two (CachingHostAllocator). Each comes back as the backward of the block after it begins,
so that two are on the device at a time.
"""

from dataclasses import replace

from launcher.memory.trace_events import Born, Freed, Key, MicroBatch, Segment


def on_host(trace: MicroBatch) -> MicroBatch:
    """The same micro-batch with the blocks' saved inputs on the host until they are fetched."""
    inputs = _inputs(trace)
    first = 1 + max(
        event.key
        for _, events in (*trace.forward, *trace.backward)
        for event in events
        if isinstance(event, Born)
    )
    fetched = {
        layer: replace(born, key=first + number, tag=born.tag._replace(category="temporary"))
        for number, (layer, born) in enumerate(inputs.items())
    }
    away = {born.key: layer for layer, born in inputs.items()}
    forward = [
        (place, [_to_host(event, away) if isinstance(event, Born) else event for event in events])
        for place, events in trace.forward
    ]
    backward: list[Segment] = []
    for place, events in trace.backward:
        if place.part == "block_backward":
            mine = fetched[place.layer].key
            arriving = [place.layer - 1] if place.layer else []
            if place.layer == max(inputs):
                arriving.insert(0, place.layer)
            events = [fetched[layer] for layer in arriving] + [
                part
                for event in events
                for part in (
                    (Freed(mine), event)
                    if isinstance(event, Freed) and event.key == inputs[place.layer].key
                    else (event,)
                )
            ]
        backward.append((place, events))
    return replace(trace, forward=forward, backward=backward)


def _inputs(trace: MicroBatch) -> dict[int, Born]:
    """What each block has saved: born in its forward, freed in its own backward."""
    freed: dict[Key, int] = {
        event.key: place.layer
        for place, events in trace.backward
        for event in events
        if isinstance(event, Freed) and place.part == "block_backward"
    }
    return {
        place.layer: event
        for place, events in trace.forward
        for event in events
        if isinstance(event, Born) and place.part == "block" and freed.get(event.key) == place.layer
    }


def _to_host(born: Born, away: dict[Key, int]) -> Born:
    if born.key not in away:
        return born
    return replace(born, size_bytes=1 << (born.size_bytes - 1).bit_length(), where="host")
