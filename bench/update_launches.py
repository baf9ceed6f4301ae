"""Kernels that one update of all parameters launches, and what it holds beside the states: fused
(torch's AdamW in fp32, launcher/optim/kernels.py for the others), and by torch's operators, as on a
CPU. No update waits for the device, or this ends with torch's complaint. Bytes moved are planned.

    python bench/update_launches.py [--size seed-134m] [--output bench/results/update_launches.json]

In the environment of tests/nullgpu/runs.py: torch's real dispatch and allocator, no kernels run.
"""

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.model.sizes import named
from launcher.optim.choice import OptimChoice
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import OPTIMIZERS, build_optimizer
from launcher.strategies.parameters import parameters_of

CHOICES = {
    "fp32 (torch's fused AdamW)": OptimChoice(),
    "bf16 moments": OptimChoice(moments_dtype="bf16", betas=(0.9, 0.99)),
    "8-bit moments": OptimChoice(optimizer="adamw8bit"),
    "bf16-pure": OptimChoice(precision="bf16-pure", betas=(0.9, 0.99)),
    "bf16-pure, 8-bit moments": OptimChoice(precision="bf16-pure", optimizer="adamw8bit"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="seed-134m")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    results = {name: measured(options.size, choice) for name, choice in CHOICES.items()}
    text = json.dumps({"size": options.size, "updates": results}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(f"{text}\n")


def measured(size: str, choice: OptimChoice) -> dict[str, dict[str, int]]:
    shapes = [parameter.shape for parameter in parameters_of(named(size))]
    costs = OPTIMIZERS[choice.optimizer].costs
    moved = {
        device: sum(costs("", shape, choice, device).update_bytes for shape in shapes)
        for device in ("cuda", "cpu")
    }
    weights = [torch.empty(of, dtype=dtypes(choice).stored, device="cuda") for of in shapes]
    optimizer: Any = build_optimizer(nn.ParameterList(weights), choice)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.found_inf = torch.zeros((), device="cuda")
    optimizer.step()  # makes the states, and compiles
    found = {"fused": update(optimizer)}
    if choice != OptimChoice():
        optimizer.found_inf = None  # the host had to look first
        for state in optimizer.state.values():
            state["step"] = 1  # a counter on the host goes with torch's operators
        optimizer.step()  # copies their tables
        found["operators"] = update(optimizer)
    for how, device in zip(found, moved, strict=False):
        found[how]["moved_bytes"] = moved[device]
    return found


def update(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    torch.cuda.reset_peak_memory_stats()
    launches = ctypes.CDLL(None).device_launches
    before, held = launches(), torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    on_top = torch.cuda.max_memory_allocated() - held
    return {"launches": launches() - before, "temporary_bytes": on_top}


if __name__ == "__main__":
    main()
