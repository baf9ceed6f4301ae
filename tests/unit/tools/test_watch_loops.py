"""Loops of training that a watched program may have, and the records of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def watched(folder: Path, program: str) -> list[dict[str, Any]]:
    """Return the records of rank 0 of a program."""
    script = folder / "program.py"
    script.write_text(program)
    words = (sys.executable, "-m", "launcher", "watch", "--out", str(folder / "run"), "--")
    done = subprocess.run(
        (*words, sys.executable, str(script)),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "run" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


SCALED = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    loss = model(torch.ones(2, 4)).mean() * 0 + 0.5
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_loss_is_as_it_was_before_a_scaler(tmp_path: Path) -> None:
    records = watched(tmp_path, SCALED)
    assert [record["loss"] for record in records if record["kind"] == "step"] == [0.5] * 3


SAVED = """\
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    {save}
"""


@pytest.mark.parametrize(
    "save",
    [
        'dcp.save(model.state_dict(), checkpoint_id="saved")',
        'save_file(model.state_dict(), "saved")',
        'torch.save(model.state_dict(), "saved")',
    ],
)
def test_a_save_is_a_phase_of_its_own(save: str, tmp_path: Path) -> None:
    phases = [one for one in watched(tmp_path, SAVED.format(save=save)) if one["kind"] == "phase"]
    assert "save" in {one["period"] for one in phases}


COMPILED = """\
import torch
model = torch.nn.DataParallel(torch.compile(torch.nn.Linear(4, 1), backend="eager"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


def test_a_compiled_model_inside_a_wrapper_has_its_name(tmp_path: Path) -> None:
    described = [one for one in watched(tmp_path, COMPILED) if "strategy" in one][-1]
    assert (described["model"], described["strategy"]) == ("Linear", "DataParallel")


PROFILED = """\
import torch
class Model(torch.nn.Linear):
    def forward(self, module):
        return super().forward(module)
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.profiler.profile(with_stack=True, with_modules=True) as profiler:
    for _ in range(2):
        model(module=torch.ones(2, 4)).mean().backward()
        optimizer.step()
profiler.export_chrome_trace("trace.json")
assert "nn.Module: Model_0" in open("trace.json").read()
"""


def test_a_profiler_of_the_program_finds_its_modules(tmp_path: Path) -> None:
    records = watched(tmp_path, PROFILED)
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]


HISTORY = """\
import torch
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=8, tolerance_change=0)
def closure():
    optimizer.zero_grad()
    loss = (model(torch.eye(8)) ** 4).sum()
    loss.backward()
    return loss
for _ in range(2):
    optimizer.step(closure)
"""


def test_the_history_of_lbfgs_is_of_the_optimizer(tmp_path: Path) -> None:
    held = [r for r in watched(tmp_path, HISTORY) if r.get("moment") == "held"]
    # Four pairs of vectors, the direction and the gradient before, beside numbers.
    assert 10 * 256 <= held[-1]["device"]["optimizer_bytes"] < 11 * 256


PARENT = """\
import os, torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
def rank(number):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    store = distributed.FileStore("store", 2)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    os.chdir(os.path.dirname(__file__))
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    spawn(rank, nprocs=2)
"""


def test_a_rank_takes_the_place_of_the_process_that_has_started_it(tmp_path: Path) -> None:
    records = watched(tmp_path, PARENT)
    assert {r["world_size"] for r in records if r["kind"] == "run"} == {2}
    assert sum(record["kind"] == "step" for record in records) == 3
    assert (tmp_path / "run" / "parent.jsonl").exists()
