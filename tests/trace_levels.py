"""Bytes of a traced micro-batch, to compare two traces by."""

from launcher.forecast.trace.events import Allocated, Freed, MicroBatch


def levels(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    """Live bytes in each segment: the highest, and those at its end.

    Not after each event: autocast drops its casts in the order of a hash map.
    """
    sizes: dict[object, int] = {}
    level, found = 0, []
    for _, events in (*micro_batch.forward, *micro_batch.backward):
        highest = level
        for event in events:
            if isinstance(event, Allocated):
                sizes[event.key] = event.size_bytes
                level += event.size_bytes
            elif isinstance(event, Freed):
                level -= sizes.pop(event.key)
            highest = max(highest, level)
        found.append((highest, level))
    return found
