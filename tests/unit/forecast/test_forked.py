"""Plans in a process that has used autograd on a machine with GPUs, as a notebook's."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
import sys

import torch
from torch.utils.backend_registration import _DummyDeviceGuard

import shardscale

# A kind of device that torch has no driver for: autograd starts a thread for it.
torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())

def planned(when):
    os.environ["SHARDSCALE_CACHE"] = os.path.join(sys.argv[1], when)  # nothing is read from it
    given = {"layers": 2, "d_model": 64, "heads": 4, "gpus": 1, "gpu": "H100", "strategy": "single"}
    given |= {"precision": "bf16-pure", "micro_batch": 2, "every": True}
    kinds = {"activation_checkpointing": "budget=16MiB"}, {"attention": "eager"}
    plans = [shardscale.plan(**given, **kind) for kind in kinds]
    return [[record["peaks_bytes"] for record in plan] for plan in plans]

if __name__ == "__main__":
    in_workers = planned("before")  # a budget records traces to find the candidates
    torch.zeros(1, requires_grad=True).sum().backward()
    assert planned("after") == in_workers
    print([len(records) for records in in_workers])
"""


def test_a_process_that_has_run_a_backward_beside_a_device_plans_the_same(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[1,", "3]"]
