"""Results of bench/gpu/plan.py, and the plan of each training run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.forecast.efficiency import predicted_range

FOLDER = Path(__file__).parent / "results" / "gpu-h200"
GPU = "H200"
SECTIONS = ("default", "strategies", "precision", "compile", "decoders")
"""Sections that hold training runs."""
SHAPES = {
    **{"llama-3.2-1b": "Llama shape", "phi3": "Phi-3", "gemma2": "Gemma 2", "mixtral": "Mixtral"},
    **{"gemma3_text": "Gemma 3", "olmo2": "OLMo 2", "gpt_oss": "gpt-oss"},
}
OF_THE_SHAPE = (
    *("--model", "--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"),
    *("--context", "--micro-batch", "--lr", "--decoder"),
)
"""Flags that stand in no table."""
OF_OTHER_LOSSES = frozenset({"--window", "--lora-rank", "muon"})
"""Flags, and values of them, with which another function is trained, or in another way."""


def records() -> dict[str, dict[str, Any]]:
    """Part -> its newest record, in the order of the plan's sections."""
    files = sorted(FOLDER.glob("*.json"))
    return {
        record["part"]: record
        for file in files
        for record in json.loads(file.read_text(encoding="utf-8"))
    }


def runs() -> dict[str, dict[str, Any]]:
    """Part -> its training run, also of a part that failed."""
    found = records()
    return {
        part: {"part": part, **record["figures"]["run"]}
        for section in SECTIONS
        for part, record in found.items()
        if part.startswith(f"{section}/") and "run" in record["figures"]
    }


def measured() -> list[dict[str, Any]]:
    """Training runs with bytes and seconds."""
    return [run for run in runs().values() if run.get("step_s") and "ledger" in run]


def peaks(run: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes planned and measured at the steady peak."""
    peak = run["ledger"]["peak"]
    return peak["planned"], peak["measured"]


def off(run: Mapping[str, Any]) -> float:
    """Return how far the planned peak is off the measured one, as a part of the measured one."""
    planned, found = peaks(run)
    return planned / found - 1


def shape_of(run: Mapping[str, Any]) -> str:
    """The model, and sequences x tokens of a step."""
    named = "--decoder" if "--decoder" in run["flags"] else "--model"
    model = run["flags"][run["flags"].index(named) + 1]
    return f"{SHAPES.get(model, model)}, {run['micro_batch']} x {run['seq_len']}"


def chosen(run: Mapping[str, Any]) -> str:
    """Flags beside those of the shape; without any, bf16 and nothing compiled."""
    flags = re.findall(r"(--\S+)((?: (?!--)\S+)*)", " ".join(run["flags"]))
    kept = [
        name + values
        for name, values in flags
        if (name not in OF_THE_SHAPE or values == " auto") and name + values != "--precision bf16"
    ]
    return f"`{' '.join(kept)}`" if kept else "defaults"


def planned_s(run: Mapping[str, Any]) -> tuple[float, float] | None:
    """Least and most seconds of a step by today's plan, or else by the run's own."""
    path = planned_path()
    today = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    seconds = today.get(run["part"]) or (run.get("plan") or {}).get("predicted_step_s")
    return predicted_range(seconds) if seconds else None


def planned_path() -> Path:
    """Return the file where `bench/gpu_planned.py` puts seconds of steps: part -> seconds."""
    return FOLDER.with_name("gpu_h200_planned.json")


def loss_off(run: Mapping[str, Any]) -> str:
    """Largest relative difference of a step's loss from the first run of the same shape.

    Nothing where others are to be expected.
    """
    alike = [other for other in measured() if shape_of(other) == shape_of(run)]
    if not alike or alike[0]["part"] == run["part"] or OF_OTHER_LOSSES & {*run["flags"]}:
        return ""
    pairs = zip(run["losses"], alike[0]["losses"], strict=False)
    most = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    return f"{most:.1e}" if most else "0"


def rehearsed() -> dict[str, Any]:
    """Program -> its rehearsal and its run."""
    found = records().get("peers/rehearsed", {"figures": {}})
    sides: dict[str, Any] = found["figures"].get("rehearsed", {})
    return sides


def peer_rows() -> list[dict[str, Any]]:
    """Rows of bench/peers.py, of all parts."""
    parts = [record for part, record in records().items() if part.startswith("peers/")]
    return [row for part in parts for row in part["figures"].get("peers", {}).get("rows", ())]


def ratio(part: str, other: str) -> float | None:
    """Seconds of a part over those of another."""
    found = runs()
    ran = [found.get(name, {}).get("step_s") for name in (part, other)]
    return ran[0] / ran[1] if ran[0] and ran[1] else None
