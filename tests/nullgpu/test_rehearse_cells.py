"""`shardscale.rehearse()` and `%%rehearse`: cells of a notebook on the null GPU."""

from pathlib import Path

import pytest

import shardscale

SETUP = """\
%matplotlib inline
import torch
from beside import WIDTH

model = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
"""
LOOP = """\
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    loss = model(torch.randn(64, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""
PARAMS = 4 * 4096 * 4096


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, in_a_folder: None) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 4096\n")


def test_cells_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = SETUP.count("\n") + 1 + LOOP.splitlines().index('    print("loss", loss.item())') + 1
    answers = {f"cell.py:{line}": 2.5}
    found = shardscale.rehearse([SETUP, LOOP], gpu="T4", steps=2, answers=answers)
    assert (found.verdict, found.fits, found.record["steps"]) == ("fits", True, 2)
    (rank,) = found.record["ranks"]
    assert rank["end"]["by_category"]["optimizer"] == pytest.approx(2 * PARAMS, rel=0.01)
    assert 4 * PARAMS < (found.allocated_peak_bytes or 0) <= (found.reserved_peak_bytes or 0)
    # What the code prints is seen where the notebook's own output is.
    assert capsys.readouterr().err.count("loss 2.5\n") == 3  # one more for its seconds
    assert {card["gpu"]: card["verdict"] for card in found.gpus}["H100"] == "fits"
    assert {card["gpu"]: card["step_s"] for card in found.gpus}["T4"] == found.step_s
    lines = repr(found).splitlines()
    assert lines[0].startswith("fits on T4 (14.50GiB): Linear, 16,777,216 parameters, 1 rank, 2 s")
    assert "run folder" not in lines[-1]
    assert list(Path().iterdir()) == [Path("beside.py")]


def test_two_ranks_that_run_out_of_memory(tmp_path: Path) -> None:
    text = SETUP.replace("WIDTH, WIDTH", "WIDTH, 64 * WIDTH") + LOOP
    command = ["torchrun", "--nproc-per-node", "2"]
    found = shardscale.rehearse(text, gpu="T4", out=tmp_path / "run", command=command)
    assert (found.verdict, found.fits, found.record["world_size"]) == ("does not fit", False, 2)
    assert found.record["out_of_memory"][0]["place"]["file"] == "cell.py"
    assert shardscale.load(tmp_path / "run").state == "oom"


def test_code_that_fails_by_itself_has_no_verdict() -> None:
    found = shardscale.rehearse(SETUP + "model(torch.ones(1, 2).cuda())", gpu="T4")
    assert (found.verdict, found.fits) == (None, False)
    assert "The program ended with an error of its own: RuntimeError" in repr(found)


def test_ranks_of_fsdp1_have_the_whole_models_parameters_and_names() -> None:
    program = """\
import os, torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layers = [torch.nn.Sequential(torch.nn.Linear(1001, 1001), torch.nn.Tanh()) for _ in range(3)]
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sub_module = torch.nn.Sequential(*(FSDP(one, **how) for one in layers))
    def forward(self, x):
        return self.sub_module(x)
how = {"use_orig_params": True, "device_id": torch.cuda.current_device()}
model = FSDP(Stack(), **how)
optimizer = torch.optim.AdamW(model.parameters())
encoder = torch.nn.Embedding(100, 1001).cuda().requires_grad_(False)
for _ in range(9):
    model(encoder(torch.zeros(4, 50, dtype=torch.long).cuda())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    command = ["torchrun", "--nproc-per-node", "2"]
    found = shardscale.rehearse(program, gpu="T4", command=command)
    assert found.verdict == "fits", repr(found)
    report = repr(found)
    assert f"FullyShardedDataParallel, {3 * (1001 + 1) * 1001:,} parameters, 2 ranks" in report
    assert "  sub_module.*.* " in report
    assert "wrapped" not in report
    assert "tokens/s" not in report  # those of a frozen encoder are no samples of the model
