"""Lines of a report on what the rehearsed steps did not show."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.tools.rehearse.stage import Stage
from launcher.tools.watch.folder import all_seen
from launcher.util.sizes import gib


def unseen_lines(stage: Stage) -> Iterator[str]:
    """Yield what no rank did before the end, and may need more than the recorded steps."""
    done = {phase["period"] for rank in stage.ranks for phase in rank.of_kind("phase")}
    if "save" in done:
        yield "  the program saved files with values that no kernel has computed: delete them"
    if all_seen(stage.ranks):
        words = {"evaluation": "an evaluation", "save": "a save"}
        missing = [word for period, word in words.items() if period not in done]
        if missing:
            yield f"  not in it: {' or '.join(missing)} after the first {stage.steps} steps"
    elif stage.ended_well and not stage.ran_out:
        steps = "1 step" if stage.steps == 1 else f"{stage.steps} steps"
        yield f"  the program ended by itself after {steps}"
        if any(rank.events("value_read") for rank in stage.ranks[:1]):
            yield "    if a value that it read has ended it, --answer FILE:LINE=VALUE sets another"
        if stage.steps == 1 and _has_states(stage):
            yield (
                "    a second step would need more: its forward and backward run beside the "
                "optimizer's states, which the first one makes"
            )
    for rank in stage.ranks[:1]:
        yield from _of_optimizers(rank.ended)
        if kinds := rank.ended.get("recurrent"):
            yield (
                f"  {' and '.join(kinds)}: run by torch's own kernels here; cuDNN's, which the "
                "null GPU lacks, may keep more or less for the backward"
            )


def other_gpu_lines(stage: Stage) -> Iterator[str]:
    """Yield what the tables of ranks lack: other GPUs of theirs, and other processes on theirs."""
    for other in stage.other_gpus:
        yield (
            f"  rank {other['rank']} uses GPU {other['gpu']}, too: allocated "
            f"{gib(other['allocated_peak_bytes'])}, reserved {gib(other['reserved_peak_bytes'])}; "
            "the tables above are of its first GPU"
        )
    for number, size in stage.beside().items():
        yield (
            f"  on rank {number}'s GPU other processes of the program take {gib(size)} beside it, "
            "with the CUDA context of each"
        )


def _of_optimizers(ended: Mapping[str, Any]) -> Iterator[str]:
    for optimizer in ended.get("unstepped", ()):
        yield (
            f"  not in it: the states of an optimizer that has not stepped: {optimizer['kind']} of "
            f"{optimizer['parameters']:,} parameters"
        )
    for history in ended.get("histories", ()):
        yield (
            f"  not in it: all {history['pairs']} pairs of vectors that {history['kind']} will "
            f"keep, {gib(history['bytes'])}, of which it has {history['made']}"
        )


def _has_states(stage: Stage) -> bool:
    return any(held.end.by_category.get("optimizer") for held in stage.held.values())
