"""Work of a rehearsed program on the host has no seconds, and a line says so."""

from pathlib import Path

import pytest
from nullgpu.runs import ROOT

import shardscale

ON_HOST = """\
import torch
model = torch.nn.Linear(4096, 4096, device="cuda")
weights = [torch.nn.Parameter(one.detach().cpu()) for one in model.parameters()]
optimizer = torch.optim.AdamW({})
for step in range(9):
    model(torch.ones(8, 4096, device="cuda")).sum().backward()
    for weight, one in zip(weights, model.parameters()):
        weight.grad, one.grad = one.grad.cpu(), one.grad
    optimizer.step()
"""


@pytest.mark.parametrize("where", ["weights", "model.parameters()"])
def test_an_optimizer_on_the_host(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    report = repr(shardscale.rehearse(ON_HOST.format(where), gpu="T4"))
    assert ("operators on tensors of the host, of " in report) == (where == "weights")
