"""Operators of one step: what they took on a GPU, beside the least that its data sheet allows.

Measured times are torch's profiler's (bench/gpu/operators.py), ideal ones those of
bench/step_budget.py for the same step.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_results import GPU, records
from step_budget import Rates, ideal_ms, rates_of

CASES = {
    "seed-134m": ("default/operators", "seed-134m bf16"),
    "Llama shape": ("default/operators-llama", "Llama-shaped bf16"),
}
"""Part of bench/gpu/plan.py, and case of bench/step_budget.py."""
BUDGET = Path(__file__).parent / "results" / "step_budget.json"
# What the dispatcher sees, and in which operator's name the profiler finds its kernels.
PROFILED = {
    "_scaled_dot_product_cudnn_attention": "_cudnn_attention_forward",
    "_scaled_dot_product_cudnn_attention_backward": "_cudnn_attention_backward",
    **dict.fromkeys(("_to_copy", "clone"), "copy_"),
}
# Called past the dispatcher: the profiler finds their kernels in the name of autograd's function.
FUNCTIONS = {
    **{"Norm": "norm", "NormBackward": "norm_backward"},
    **{"SwiGLU": "swiglu", "SwiGLUBackward": "swiglu_backward"},
    **dict.fromkeys(("Rotate", "RotateBackward"), "rotate_"),
}


class Operator(NamedTuple):
    """All calls of an operator in a step."""

    name: str
    calls: int
    ideal_ms: float
    measured_ms: float


def operators(name: str) -> list[Operator]:
    """Return the operators of one of the CASES, those that lose most against their ideal first;
    none if not measured."""
    part, case = CASES[name]
    rows = records().get(part, {"figures": {}})["figures"].get("operators", [])
    ideal = ideal_of(case, rates_of(GPU))
    calls: Counter[str] = Counter()
    measured_us: Counter[str] = Counter()
    for row in rows:
        namespace, _, operator = row["name"].rpartition("::")
        operator = FUNCTIONS.get(row["name"], operator)
        ours = operator in FUNCTIONS.values()
        if operator in ideal and (ours or namespace in ("aten", "shardscale")):
            calls[operator] += row["calls"]
            measured_us[operator] += row["device_us"]
    found = [Operator(name, calls[name], ideal[name], measured_us[name] / 1e3) for name in calls]
    return sorted(found, key=lambda each: each.ideal_ms - each.measured_ms)


def ideal_of(case: str, rates: Rates) -> Mapping[str, float]:
    """Operator as the profiler names it -> ideal milliseconds."""
    content: dict[str, Any] = json.loads(BUDGET.read_text(encoding="utf-8"))
    found: defaultdict[str, float] = defaultdict(float)
    for row in content["cases"][case]["rows"]:
        operator = row["operator"]
        found[PROFILED.get(operator, operator)] += ideal_ms(row, rates)
    return found


if __name__ == "__main__":
    for shape in CASES:
        print(shape)
        for each in operators(shape)[:14]:
            print(f"  {each.name:40} {each.calls:5} {each.ideal_ms:7.2f} {each.measured_ms:7.2f}")
