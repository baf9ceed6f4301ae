"""Norms of transformers by the project's kernel: which, and with which values and types."""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_architectures import ARCHITECTURES, MORE
from torch import Tensor, nn

from launcher.model.foreign import norms
from launcher.model.foreign.decoder import skeleton
from launcher.model.foreign.reading import foreign_config
from launcher.model.layers import normalized

ALL: Mapping[str, Mapping[str, Any]] = {**ARCHITECTURES, **MORE}


class Taken:
    """`fused` where every norm is for the kernel, and the norms that it computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(norms, "fused", SimpleNamespace(takes_norm=lambda x: True))
        monkeypatch.setattr(norms, "normalized", self._normalized)

    def _normalized(self, *arguments: Any) -> Any:
        self.count += 1
        return normalized(*arguments)  # by torch's own, on a CPU


def norms_of(name: str) -> Iterator[nn.Module]:
    for module in skeleton(foreign_config(ALL[name]).document, "auto").modules():
        if "RMSNorm" in type(module).__name__:
            yield module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["phi3", "gemma2", "gemma3_text", "olmo2", "mixtral", "gpt_oss"])
def test_values_gradients_and_types_are_transformers_own(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Tensor, ...]] = []
    taken = None
    for _ in range(2):
        norm = next(norms_of(name))
        width = norm.get_parameter("weight").numel()
        weight = nn.Parameter(torch.linspace(-0.5, 1.5, width))
        monkeypatch.setitem(norm._parameters, "weight", weight)
        x = torch.linspace(-3.0, 2.0, 6 * width).view(2, 3, width).to(dtype).requires_grad_()
        y = norm(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        found.append((y.detach(), x.grad, weight.grad))
        taken = taken or Taken(monkeypatch)
    assert taken is not None
    assert taken.count == 1
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for theirs, ours in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        most = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * most)


def test_what_is_more_than_a_norm_is_left_alone() -> None:
    gated = [type(m) for m in norms_of("mamba2") if "Gated" in type(m).__name__]
    assert gated
    assert norms._fused[gated[0]] is None


class _RMSNorm(nn.Module):
    """As in transformers, but for what is made of the unit."""

    def __init__(self, of_unit: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self.of_unit = nn.Parameter(torch.ones(8)), 1e-6, of_unit

    def forward(self, x: Tensor) -> Tensor:
        return self.of_unit(x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt(), self.weight)


@pytest.mark.parametrize(
    ("of_unit", "offset"),
    [
        (lambda unit, weight: unit * weight, 0.0),
        (lambda unit, weight: unit * (1 + weight), 1.0),
        (lambda unit, weight: unit * weight.sigmoid(), None),
        (lambda unit, weight: unit * weight + 1e-3, None),
        (lambda unit, weight: unit.view(-1, 3) * weight, None),
    ],
)
def test_the_form_is_found_by_numbers(
    of_unit: Callable[[Tensor, Tensor], Tensor], offset: float | None
) -> None:
    form = norms._form_of(_RMSNorm(of_unit))
    assert (None if form is None else form[1]) == offset
