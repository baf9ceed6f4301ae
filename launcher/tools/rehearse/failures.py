"""Lines of a report on a program that ran out of memory, or failed."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.tools.rehearse.limits import INSTEAD, lacking_library
from launcher.tools.rehearse.rehearsal import Rehearsal
from launcher.tools.rehearse.remedies import remedies
from launcher.tools.rehearse.stage import Stage
from launcher.tools.watch.tables import from_here
from launcher.util.sizes import gib

_FROM_OUTSIDE = ("SIGHUP", "SIGINT", "SIGKILL", "SIGTERM")


def out_of_memory_lines(result: Rehearsal) -> Iterator[str]:
    """Yield which request ended the program, its line, and what to change."""
    for failure in result.stage.events("out_of_memory")[:1]:
        inside = f", in {failure['module']}" if failure.get("module") else ""
        yield (
            f"Out of memory in {failure['phase']}{inside}: rank {failure['rank']} asked for "
            f"{gib(failure['requested_bytes'])}, {gib(failure['free_bytes'])} were free"
        )
        yield from _place(failure.get("place"))
        known = result.stage.held.get(failure["rank"])
        if known is not None:
            alive = sorted(known.end.by_category.items(), key=lambda item: -item[1])
            yield "  alive then: " + ", ".join(f"{name} {gib(size)}" for name, size in alive)
    for suggestion in suggestions(result):
        yield f"  try {suggestion}"


def _place(place: Mapping[str, Any] | None) -> Iterator[str]:
    if place:
        inside = f" in {place['function']}" if "function" in place else ""
        yield f"  {from_here(place['file'])}:{place['line']}{inside}: {place['code']}"


def failed_lines(stage: Stage) -> Iterator[str]:
    """Yield the error that has ended the program, and its line."""
    if stage.status.state != "failed":
        return
    if library := lacking(stage):
        yield (
            f"The program calls {library}, which the null GPU lacks: a limit of the rehearsal, "
            f"and no fault of the program ({stage.status.reason})"
        )
    elif (signal := (stage.status.reason or "").removeprefix("ended by ")) in _FROM_OUTSIDE:
        likely = ": a machine that runs out of host memory does that" if signal == "SIGKILL" else ""
        yield f"The program was {stage.status.reason}, from outside{likely}"
    else:
        yield from _error_lines(stage)
        return
    yield from _place(stage.status.detail.get("place"))
    if library in INSTEAD:
        yield f"  try {INSTEAD[library]}"


def _error_lines(stage: Stage) -> Iterator[str]:
    reads = bool(stage.events("value_read"))
    kind = "an error" if reads else "an error of its own"
    yield f"The program ended with {kind}: {stage.status.reason}"
    yield from _place(stage.status.detail.get("place"))
    if "invalid device ordinal" in (stage.status.reason or ""):
        yield "  try --gpus N: the program uses more GPUs than the node was given"
    elif reads:
        yield (
            "  It may come from a value that no kernel has computed: those that it read are listed "
            "below, and --answer FILE:LINE=VALUE sets one"
        )


def lacking(stage: Stage) -> str | None:
    """Return the library whose absence on the null GPU has ended the program, or None."""
    failed = stage.status.state == "failed"
    return lacking_library(stage.status.reason or "") if failed else None


def caught_lines(stage: Stage) -> Iterator[str]:
    """Yield how often the program ran out of memory and went on."""
    if not stage.caught:
        return
    count, place = len(stage.caught), stage.caught[-1].get("place")
    times = "once" if count == 1 else f"{count:,} times"
    last = f", the last at {from_here(place['file'])}:{place['line']}" if place else ""
    then = (
        "it took no step after that"
        if stage.gave_up
        else "it may take another way on another GPU, so rehearse it there"
    )
    yield f"It ran out of memory {times}, caught by the program{last}; {then}"


def suggestions(result: Rehearsal) -> list[str]:
    """Return what to set, for what takes most at the peak first."""
    if result.verdict == "fits" or result.verdict is None:
        return []
    whole = result.whole
    content = whole.held.get(whole.worst.number)
    if content is None:
        return []
    last = next(iter(whole.worst.events("out_of_memory")), {})
    libraries = (whole.worst.ended or last).get("libraries", [])
    return remedies(content.peak.by_category, content.peak.phase, libraries)
