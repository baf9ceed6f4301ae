"""The cheapest changes of a file's own keys with which its run fits, each planned in full."""

import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.forecast.fit import Verdict, verdict
from launcher.forecast.timing import step_seconds
from launcher.tools.plan_from.assess import Planned, plan_of
from launcher.tools.plan_from.editing import edited, said
from launcher.tools.plan_from.reading import Source, source_of
from launcher.util.errors import Failure, UserError
from launcher.util.sizes import gib

MOST: Final = 3
PATIENCE_S: Final = 20.0
"""CPU time of the search; it ends with what was found by then."""
Edit = Mapping[str, Any]


class Change(NamedTuple):
    """An edit of the file, and the run with it."""

    what: str
    edit: Edit
    text: str
    """The whole file, changed."""
    used_bytes: int
    slower: float
    """Predicted step seconds of the same global batch, relative to the run as it is, less 1."""


def changes_of(planned: Planned, argv: Sequence[str]) -> list[Change]:
    """Return at most three changes, the fastest first; none where the run fits with room.

    Where a run does not fit and none fits with room, they are those that are too close to call.
    """
    if planned.verdict == "fits":
        return []
    deadline_s = time.thread_time() + PATIENCE_S
    before_s, tried = _step_s(planned), list[Change]()

    def is_over() -> bool:
        return time.thread_time() > deadline_s or len(_that_are("fits", tried, planned)) >= MOST

    for what, edit in _edits(planned):
        if is_over():
            break
        change = _tried(planned, argv, what, edit, before_s)
        if change is not None and change.used_bytes < planned.used_bytes:
            tried.append(change)
    # Several together, from the mildest on, until they fit; with a smaller micro-batch at the end.
    own = planned.reading.kind.micro_batch
    together: dict[str, Any] = {}
    names: dict[tuple[str, ...], str] = {}
    for single in sorted(tried, key=lambda change: own in change.edit):
        if is_over():
            break
        together |= single.edit
        names[tuple(single.edit)] = single.what  # a smaller micro-batch replaces a larger one
        if len(names) == 1:
            continue  # it was tried alone
        change = _tried(planned, argv, "; ".join(names.values()), together, before_s)
        if change is not None:
            tried.append(change)
            if _that_are("fits", [change], planned):
                break
    found = _that_are("fits", tried, planned)
    if not found and planned.verdict == "does not fit":
        found = _that_are("tight", tried, planned)
    return sorted(found, key=lambda change: change.slower)[:MOST]


def _that_are(word: Verdict, changes: Sequence[Change], planned: Planned) -> list[Change]:
    return [c for c in changes if verdict(c.used_bytes, planned.memory_bytes) == word]


def patch_of(source: Source, change: Change) -> str:
    """Return a unified diff that `patch -p1` and `git apply` take."""
    path = source.path.resolve()
    folder = Path().resolve()
    name = (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()
    name = name.lstrip("/")
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        change.text.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def line_of(change: Change, planned: Planned) -> str:
    """Say a change in the words of the file, and what it costs."""
    format_ = planned.reading.source.format
    words = ", ".join(said(key, value, format_) for key, value in change.edit.items())
    pace = "slower" if change.slower >= 0 else "faster"
    room = f"{gib(change.used_bytes)} of {gib(planned.memory_bytes)}"
    return f"{words}  ({change.what}; {room}, about {abs(change.slower):.0%} {pace})"


def _edits(planned: Planned) -> Iterator[tuple[str, Edit]]:
    """Yield edits that apply to this run, mildest first."""
    kind, fields, flat = planned.reading.kind, planned.fields, planned.reading.source.flat
    micro, world = fields["micro_batch"], planned.cluster.world_size
    own = "micro_batch" in planned.reading.facts and kind.micro_batch
    if own and micro > 1:
        smaller = micro // 2 if micro % 2 == 0 else 1
        for size in dict.fromkeys((smaller, 1)):
            edit: Edit = {kind.micro_batch: size}
            if kind.accumulation:
                before = planned.reading.facts.get("accumulation", 1)
                edit = {**edit, kind.accumulation: before * micro // size}
            kept = kind.accumulation or "global_batch" in planned.reading.facts
            yield f"a micro-batch of {size}{', accumulated' if kept else ''}", edit
    for what, edit in kind.changes:
        keys = list(edit)
        sections = {key.split(".")[0] for key in keys if "." in key}
        has = {key.split(".")[0] for key in flat}
        # a YAML file without the section shards in another way
        nests = planned.reading.source.format != "YAML"
        if sections - has and all("." in key for key in keys) and not nests:
            continue
        alone = world == 1 or (fields.get("zero") is not None and "FSDP" in what)
        if "shards" in what and alone and not keys[0].startswith("devices"):
            continue
        if any(name in what for name in ("4 bits", "adapters")) and "lora_rank" not in fields:
            continue
        yield what, edit


def _tried(
    planned: Planned, argv: Sequence[str], what: str, edit: Edit, before_s: float
) -> Change | None:
    source = planned.reading.source
    if all(source.flat.get(key) == value for key, value in edit.items()):
        return None  # as it is already
    try:
        text = edited(source, edit)
        if text == source.text:
            return None
        now = source_of(source.path, text).under(source.over)
        after = plan_of([now, *planned.others], argv)
    except (UserError, Failure):  # it does not go with the rest of the run
        return None
    left = " ".join(after.reading.left_out)
    if any(f"{key} " in left for key in edit):
        return None
    return Change(what, dict(edit), text, after.used_bytes, _step_s(after) / before_s - 1)


def _step_s(planned: Planned) -> float:
    cluster = planned.cluster
    run = planned.assessment.run
    seconds = step_seconds(
        run,
        gpus_per_node=cluster.ranks_per_node,
        machine=cluster.machine,
    ).total_s
    return seconds / run.global_batch
