"""The strongest figures of one GPU in few lines, for the README and first pages."""

import statistics
from collections.abc import Iterator, Sequence

from gpu_results import GPU, chosen, measured, off, peer_rows, planned_s, rehearsed

LARGE = 0.01
"""An error of planned bytes from which its run is named."""


def headline(arguments: Sequence[str]) -> str:
    """The argument is where the page of all figures is."""
    (page,) = arguments
    lines = [f"One run each on [one NVIDIA {GPU}]({page}):", ""]
    lines += [f"- {line}" for line in (*_bytes(), *_rehearsals(), *_over_peers(), *_seconds())]
    return "\n" + "\n".join(lines) + "\n"


def _bytes() -> Iterator[str]:
    found = sorted(measured(), key=lambda run: abs(off(run)))
    if not found:
        return
    misses = [abs(off(run)) for run in found]
    worst = f"{misses[-1]:.2%}"
    if misses[-1] > LARGE and len(misses) > 1:
        worst = f"{misses[-2]:.2%} beside {misses[-1]:.0%} of {chosen(found[-1])}"
    yield (
        f"planned peaks of {len(found)} training runs: median error "
        f"{statistics.median(misses):.2%}, worst {worst}"
    )


def _rehearsals() -> Iterator[str]:
    sides = [side for side in rehearsed().values() if side["measured"].get("step_s")]
    misses = [
        abs(side["rehearsed"].get(figure, 0) / side["measured"][figure] - 1)
        for side in sides
        for figure in ("allocated_peak_bytes", "reserved_peak_bytes")
    ]
    if misses:
        yield f"rehearsed bytes of {len(sides)} unchanged programs: worst error {max(misses):.3%}"


def _over_peers() -> Iterator[str]:
    found = {
        row["peer"]: row
        for row in peer_rows()
        if row["case"] == "single" and row["flags"] == "defaults" and "error" not in row
    }
    plain, fused = found.get("accelerate"), found.get("accelerate-fused-gelu")
    if plain and fused:
        speeds = [row["tokens_per_s_ratio"]["median"] for row in (plain, fused)]
        sizes = [row["launcher"]["peak_bytes"] / row["peak_bytes"] for row in (plain, fused)]
        yield (
            f"tokens/s over transformers' GPT-2 under accelerate: {speeds[0]:.1f}, in "
            f"{sizes[0]:.2f} of its memory; {speeds[1]:.1f} and {sizes[1]:.2f} with its GELU fused"
        )


def _seconds() -> Iterator[str]:
    pairs = [(ends, run["step_s"]) for run in measured() if (ends := planned_s(run))]
    inside = sum(least <= step_s <= most for (least, most), step_s in pairs)
    if pairs:
        yield f"step times within the plan's range: {inside} of {len(pairs)}"
