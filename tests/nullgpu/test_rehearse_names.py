"""Names of modules in the ledger of a rehearsal."""

import pytest

import shardscale

pytestmark = pytest.mark.usefixtures("in_a_folder")

TWO = """\
import torch
class Left(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
    def forward(self, x):
        return self.layer(x)
class Right(Left): pass
left, right = Left().cuda(), Right().cuda()
optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()])
for step in range(9):
    right(left(torch.ones(8, 1024, device="cuda"))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FROZEN = "left.requires_grad_(False)"
MADE = """\
import torch
class Inner(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones(2**20, 1, device="cuda")
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
        self.layer.forward = self.made
    def made(self, x):
        return Inner()(x) * self.layer[0].weight[0]
    def forward(self, x):
        return self.layer(x)
model = Outer().cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    model(torch.ones(8, device="cuda")).sum().backward()
    optimizer.step()
"""


def by_module(program: str) -> set[str]:
    return set(shardscale.rehearse(program, gpu="T4").record["ranks"][0]["peak"]["by_module"])


@pytest.mark.parametrize(("frozen", "prefixed"), [("", "Right"), (FROZEN, "Left")])
def test_two_models_with_equal_names_have_lines_of_their_own(frozen: str, prefixed: str) -> None:
    program = TWO.replace("optimizer =", f"{frozen}\noptimizer =", 1)
    assert by_module(program) == {"layer", f"{prefixed}.layer", "(outside of modules)"}


def test_a_module_that_is_made_in_a_forward_is_part_of_the_one_around_it() -> None:
    names = by_module(MADE)
    assert "layer" in names
    assert "Inner" not in names
