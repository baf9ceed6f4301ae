"""Tables of docs/on-a-gpu.md, from what bench/gpu/plan.py has measured on one GPU.

A part without a result is left out; one that failed says so. Plans are those that the runs had
before their first step: a planner of today may have learnt from these figures.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gpu_operators
from gpu_headline import headline
from gpu_results import (
    GPU,
    chosen,
    loss_off,
    off,
    peaks,
    peer_rows,
    planned_s,
    ratio,
    records,
    rehearsed,
    runs,
    shape_of,
)

from launcher.forecast.efficiency import EFFICIENCIES, architecture
from launcher.measure.hardware import gpu_named
from launcher.util.sizes import GIB

PROGRAMS = {
    "loop": "GPT-2 124M, a loop under autocast",
    "accumulating": "Qwen3 0.6B in bf16, 4 micro-batches",
    "trainer": "Llama 1B, transformers' Trainer, checkpointing",
}
"""Of bench/gpu/programs.py."""
TRAINERS = {
    "accelerate": "accelerate",
    "accelerate-fused-gelu": "accelerate, its GELU fused",
    "fabric": "Lightning Fabric",
    "deepspeed-zero3": "DeepSpeed ZeRO-3",
}
"""Of bench/peers.py, each around transformers' GPT-2."""
MOST = 6
"""Operators that are shown, of each step."""
LARGE = 0.01
"""An error of planned bytes that few digits show."""


def gib(size: int | None, digits: int = 3) -> str:
    return "n/a" if size is None else f"{size / GIB:.{digits}f}"


def percent(value: float) -> str:
    """With as many digits as tell it from nothing."""
    shown = f"{value:+.1%}" if abs(value) >= LARGE else f"{value:+.3%}"
    return "0" if not shown.strip("+-0.%") else shown


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table of Markdown, whose first `text` columns are text."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * text + "---:|" * (len(titles) - text)]
    return "\n" + "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def machine(_: Sequence[str]) -> str:
    """Name the GPU, its driver and the packages."""
    newest = sorted(records().values(), key=lambda record: str(record["finished"]))[-1:]
    if not newest:
        return ""
    (found,) = newest
    about = found["machine"]
    names = ("triton", "deepspeed", "transformers", "accelerate", "lightning-fabric")
    packages = [f"{name} {about['packages'][name]}" for name in names if name in about["packages"]]
    return (
        f"\nOne {about['name']} ({about['memory_bytes'] / GIB:.1f} GiB), driver {about['driver']}, "
        f"torch {about['torch']}, Python {about['python']},\n{', '.join(packages)}; "
        f"{found['finished'][:10]}.\n"
    )


def training(_: Sequence[str]) -> str:
    """A row per training run: its plan beside what it took."""
    titles = (
        *("shape", "flags", "planned GiB", "measured", "off", "reserved", "plan, ms/step"),
        *("measured", "tokens/s", "loss off"),
    )
    return table(titles, (_row(run) for run in runs().values()), text=2)


def _row(run: Mapping[str, Any]) -> Sequence[str]:
    about = [shape_of(run), chosen(run)]
    if not run.get("step_s"):
        return [*about, "failed", *["n/a"] * 7]
    cells = ["n/a"] * 3
    if "ledger" in run:
        before, found = peaks(run)
        cells = [gib(before), gib(found), percent(off(run))]
    planned = planned_s(run)
    between = "-".join(f"{1e3 * end:.1f}" for end in planned) if planned else "n/a"
    seconds = [between, f"{1e3 * run['step_s']:.1f}", f"{run['tokens_per_s']:,.0f}"]
    return [*about, *cells, gib(run["reserved_peak_bytes"]), *seconds, loss_off(run)]


def programs(_: Sequence[str]) -> str:
    """Programs of others: rehearsed beside run."""
    titles = (
        *("program", "allocated GiB, rehearsed", "measured", "reserved, rehearsed", "measured"),
        *("s/step, rehearsed", "measured"),
    )
    return table(titles, (_program(name, sides) for name, sides in rehearsed().items()))


def _program(name: str, sides: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    ours, theirs = sides["rehearsed"], sides["measured"]
    peaks_of = ("allocated_peak_bytes", "reserved_peak_bytes")
    sizes = [gib(side.get(figure)) for figure in peaks_of for side in (ours, theirs)]
    known = ours.get("least_s") is not None
    between = f"{ours['least_s']:.3f}-{ours['most_s']:.3f}" if known else "n/a"
    step = f"{theirs['step_s']:.3f}" if theirs.get("step_s") else "n/a"
    return [PROGRAMS.get(name, name), *sizes, between, step]


def peers(_: Sequence[str]) -> str:
    """Other trainers, in turn with ours in the same process."""
    titles = (
        *("they", "ours", "tokens/s over theirs", "quartiles", "memory of theirs"),
        *("ours, GiB", "theirs"),
    )
    return table(titles, map(_peer, peer_rows()), text=2)


def _peer(row: Mapping[str, Any]) -> Sequence[str]:
    flags = {"defaults": "defaults", "both-compile": "both compiled"}.get(row["flags"])
    about = [TRAINERS.get(row["peer"], row["peer"]), flags or f"`{row['flags']}`"]
    if "error" in row:
        return [*about, "failed", *["n/a"] * 4]
    speed = row["tokens_per_s_ratio"]
    ours, theirs = row["launcher"]["peak_bytes"], row["peak_bytes"]
    quartiles = f"{speed['lower_quartile']:.2f}-{speed['upper_quartile']:.2f}"
    sizes = (gib(ours, 2), gib(theirs, 2))
    return [*about, f"{speed['median']:.2f}", quartiles, f"{ours / theirs:.2f}", *sizes]


def kernels(_: Sequence[str]) -> str:
    """Milliseconds of kernels; what cannot run says so."""
    found = records().get("kernels/times", {"figures": {}})
    rows = found["figures"].get("times", {}).get("rows", {})
    shown = []
    for name, row in rows.items():
        kind, _, which = name.partition(", ")
        shown.append((kind, which, f"{row['ms']:.2f}" if row.get("ms") else "failed"))
    return table(("kernel", "", "ms"), shown, text=2)


def operators(_: Sequence[str]) -> str:
    """Operators that lose most against their ideal, and all others together."""
    rows = []
    for shape in gpu_operators.CASES:
        found = gpu_operators.operators(shape)
        groups = [(each.name, str(each.calls), [each]) for each in found[:MOST]]
        if found:
            groups.append(("all others", "", found[MOST:]))
        for name, calls, group in groups:
            ideal_ms = sum(each.ideal_ms for each in group)
            measured_ms = sum(each.measured_ms for each in group)
            rows.append((shape, name, calls, f"{ideal_ms:.1f}", f"{measured_ms:.1f}"))
    return table(("step", "operator", "calls", "ideal ms", "measured"), rows, text=2)


def tests(_: Sequence[str]) -> str:
    """Count passed and failed tests of each part."""
    rows = []
    for part, record in records().items():
        ends = [re.search(r"^(\d+ .*) in [\d.]+s", line) for line in record["last_lines"]]
        if said := [found[1] for found in ends if found]:
            rows.append((f"`{part}`", re.sub(r", \d+ warnings?", "", said[-1])))
    return table(("tests", "ended with"), rows, text=2)


def remarks(_: Sequence[str]) -> str:
    """Ratios of runs, and the host's part in small ones."""
    lines = [*_host(), *_fp8(), *_compiled()]
    return "\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _host() -> Iterator[str]:
    rates = records().get("default/rates", {"figures": {}})["figures"].get("rates")
    eager = runs().get("default/small-eager", {})
    if rates is None or not eager.get("step_s"):
        return
    assumed = EFFICIENCIES[architecture(gpu_named(GPU))].operator_s
    yield (
        f"The host is slow: an operator takes {1e6 * rates['operator_s']:.1f} us to start, and the "
        f"plan assumes {1e6 * assumed:.1f}.\n  So it bounds what starts many small kernels: "
        "micro-batch 8 without CUDA graphs, FSDP, ZeRO-2 and ZeRO-3 on one rank."
    )
    if faster := ratio("default/small-eager", "default/small"):
        yield (
            f"CUDA graphs make micro-batch 8 {faster:.1f} times as fast, with the same losses: "
            f"{1e3 * eager['step_s']:.1f} ms, then {1e3 * runs()['default/small']['step_s']:.1f}."
        )


def _fp8() -> Iterator[str]:
    plain = ratio("precision/fp8", "default/run")
    compiled = ratio("compile/fp8", "compile/bf16")
    if plain and compiled:
        yield (
            f"fp8 does not pay at this width (768): {plain:.1f} times the seconds of bf16, and "
            f"{compiled:.2f} times where both are compiled."
        )


def _compiled() -> Iterator[str]:
    ours = ratio("default/run", "compile/bf16")
    llama = ratio("default/llama", "default/llama-compiled")
    if ours and llama:
        yield (
            f"Compiling makes seed-134m {ours:.2f} times as fast, the Llama shape {llama:.2f}, "
            "and both take less memory."
        )


TABLES: Mapping[str, Callable[[Sequence[str]], str]] = {
    **{"gpu-machine": machine, "gpu-runs": training, "gpu-programs": programs},
    **{"gpu-peers": peers, "gpu-kernels": kernels, "gpu-tests": tests},
    **{"gpu-remarks": remarks, "gpu-headline": headline, "gpu-operators": operators},
}
