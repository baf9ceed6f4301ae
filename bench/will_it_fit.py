"""Will it fit: ten models on eight GPUs, one to eight of them, under every strategy.

Nothing runs: each cell is what `shardscale plan` says of one configuration, all with AdamW, bf16
over fp32 master weights, full activation checkpointing, one sequence of 2,048 tokens per GPU (1,024
for gpt2-xl, whose context that is) and the loss in chunks. docs/will-it-fit.md is made of the
result by bench/docs_pages.py.

    python bench/will_it_fit.py                       all of it, about 5 minutes on one core
    python bench/will_it_fit.py --models gpt2-xl      these rows again; the others stay
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runs import ROOT

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.allocator import replay
from launcher.forecast.fit import STAGING_BYTES, verdict, within
from launcher.forecast.predict import predict
from launcher.measure.hardware import CONTEXT_BYTES, NCCL_GROUP_BYTES, Gpu, gpu_named
from launcher.model.sizes import NAMED

RESULT = ROOT / "bench" / "results" / "will_it_fit.json"
SEQ_LEN = 2048
MODELS = (
    *("qwen2.5-0.5b", "llama-3.2-1b", "gpt2-xl", "llama-3.2-3b", "qwen3-4b"),
    *("mistral-7b", "llama-3.1-8b", "qwen3-8b", "13b", "llama-3.1-70b"),
)
GPUS = ("L4", "RTX-4090", "RTX-5090", "A100-40GB", "L40S", "A100-80GB", "H100", "H200")
_CPU, _PARAM = {"offload_optimizer": "cpu"}, {"offload_param": "cpu"}
_LORA = {"lora_rank": 8, "lora_targets": "all"}
CHOICES: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {
        "single": {"strategy": "single"},
        "zero2+cpu": {"zero": 2, **_CPU},
        "zero3+cpu+param": {"zero": 3, **_CPU, **_PARAM},
        "LoRA": {"strategy": "single", **_LORA},
        "LoRA, nf4": {"strategy": "single", **_LORA, "quantize_base": "nf4"},
    }
}
_SEVERAL: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "fsdp": {"strategy": "fsdp"},
    "zero3": {"zero": 3},
    "zero3+cpu": {"zero": 3, **_CPU},
    "zero3+cpu+param": {"zero": 3, **_CPU, **_PARAM},
    "fsdp, LoRA": {"strategy": "fsdp", **_LORA},
}
CHOICES = {**CHOICES, 4: _SEVERAL, 8: _SEVERAL}
"""Number of GPUs -> name of a choice -> what it sets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One model under one choice on so many of one GPU."""

    model: str
    gpus: int
    choice: str
    gpu: str
    used_bytes: int
    """Of one GPU at the highest moment; where that is more than there is, at least that."""
    memory_bytes: int
    host_bytes: int
    """Of the host, all ranks together."""
    verdict: str


def cells_of(model: str) -> list[Cell]:
    """All cells of a model."""
    return [
        cell(model, ranks, name, changes, gpu_named(gpu))
        for ranks, named in CHOICES.items()
        for name, changes in named.items()
        for gpu in GPUS
    ]


def cell(model: str, ranks: int, choice: str, changes: Mapping[str, Any], gpu: Gpu) -> Cell:
    """Return the cell with what `shardscale plan` says of it."""
    config = RunConfig().replace(
        model=model,
        seq_len=min(SEQ_LEN, NAMED[model].context),
        micro_batch=1,
        precision="bf16",
        activation_checkpointing="full",
        **changes,
    )
    resolved = resolve(config, world_size=ranks, device_type="cuda")
    prediction = predict(resolved, gpu=gpu)
    around = STAGING_BYTES + CONTEXT_BYTES + (NCCL_GROUP_BYTES if ranks > 1 else 0)
    limit_bytes = gpu.memory_bytes - around
    used = prediction.peak_bytes
    if used <= limit_bytes:
        use = replay(
            prediction.events,
            prediction.streams,
            limit_bytes=limit_bytes,
            expandable_segments=True,
        )
        used = within(use, limit_bytes)
    return Cell(
        model=model,
        gpus=ranks,
        choice=choice,
        gpu=gpu.name,
        used_bytes=around + used,
        memory_bytes=gpu.memory_bytes,
        host_bytes=ranks * prediction.host_bytes,
        verdict=verdict(around + used, gpu.memory_bytes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else []
    by_model = {name: [row for row in kept if row["model"] == name] for name in MODELS}
    for name in options.models:
        by_model[name] = [dataclasses.asdict(found) for found in cells_of(name)]
        fitting = sum(row["verdict"] == "fits" for row in by_model[name])
        print(f"{name}: {fitting} of {len(by_model[name])} fit", flush=True)
        rows = [json.dumps(row) for rows in by_model.values() for row in rows]
        options.out.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
