"""Programs that end where what they read does not get better."""

import pytest

import shardscale

pytestmark = pytest.mark.usefixtures("in_a_folder")

BY_HAND = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
criterion = torch.nn.MSELoss()
inputs = torch.ones(8, 1024, device="cuda")
best, patience = float("inf"), 0
while patience < 1:
    criterion(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        val_loss = criterion(model(inputs), inputs){read}
    best, patience = (val_loss, 0) if val_loss < best - 1e-3 else (best, patience + 1)
"""


ENDS = """\
import torch
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    if step == 2 and model.weight.norm().item() > 0:
        break
"""


@pytest.mark.parametrize("read", [".item()", ""])
def test_a_loss_that_is_awaited_with_patience_falls(read: str) -> None:
    found = shardscale.rehearse(BY_HAND.format(read=read), gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert found.step_s is not None
    answers = [(one["answer"], one.get("trend")) for one in found.record["ranks"][0]["values"]]
    assert answers == ([(1.0, "falling")] if read else [(True, None)])


BY_SCORE = """\
import torch
model = torch.nn.Linear(1024, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
inputs, labels = torch.ones(8, 1024, device="cuda"), torch.zeros(8, device="cuda").long()
best = patience = 0
while patience < 1:
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    with torch.no_grad():
        pred = model(inputs).argmax(1)
        {acc}
    best, patience = (acc, 0) if acc > best else (best, patience + 1)
"""


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("acc = (pred == labels).float().mean().item()", [(0.5, "rising")]),
        (
            "acc = int((pred == labels).sum()) / int((labels >= 0).sum())",
            [(1, "rising"), (1, None)],
        ),
        ("acc = (pred == labels).float().mean()", [(True, None)]),
    ],
)
def test_a_score_that_is_awaited_with_patience_rises(line: str, answers: list[object]) -> None:
    found = shardscale.rehearse(BY_SCORE.format(acc=line), gpu="T4")
    assert (found.verdict, found.record["steps"]) == ("fits", 3)
    assert found.step_s is not None
    reads = found.record["ranks"][0]["values"]
    assert [(one["answer"], one.get("trend")) for one in reads] == answers


def test_a_program_that_a_value_has_ended() -> None:
    report = repr(shardscale.rehearse(ENDS, gpu="T4"))
    assert "if a value that it read has ended it, --answer FILE:LINE=VALUE sets another" in report
    assert "after those that were recorded: --steps 2 leaves one for them" in report
