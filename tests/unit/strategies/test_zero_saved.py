"""Stage 3 releases experts after a block's forward, and autograd keeps nothing of them."""

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from launcher.strategies.zero.saved import saving_places


class Experts(nn.Module):
    """As transformers' are: one parameter, multiplied through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows, self.matrices.transpose(1, 2)).square().sum()


def test_experts_leave_after_the_forward_and_have_the_same_gradients() -> None:
    experts, rows = Experts(), torch.randn(3, 2, 4, requires_grad=True)
    expected = torch.autograd.grad(experts(rows), (rows, experts.matrices))

    parameter: Any = experts.matrices
    whole = parameter.detach().clone()
    with saving_places(experts):
        loss = experts(rows)
    gathered = StorageWeakRef(parameter.untyped_storage())
    parameter.data = torch.empty(0)  # released
    assert gathered.expired()
    # Gathered again, elsewhere in a larger buffer.
    parameter.data = torch.cat([torch.zeros(7), whole.flatten()])[7:].view_as(whole)
    found = torch.autograd.grad(loss, (rows, parameter))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_without_experts_saves_as_it_did() -> None:
    linear = nn.Linear(2, 2)
    with saving_places(linear):
        linear(torch.randn(1, 2)).sum().backward()
    assert linear.weight.grad is not None
