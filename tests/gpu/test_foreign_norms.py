"""Norms of transformers by the project's kernel on a GPU, beside their own forward there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import write_config
from torch import Tensor, nn

from launcher.model.foreign.decoder import skeleton
from launcher.model.foreign.reading import foreign_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
transformers = pytest.importorskip("transformers")

DEVICE = "cuda"
SHAPES: dict[str, tuple[int, ...]] = {"stream": (3, 17, 768), "heads": (2, 5, 12, 64)}


def norm_of(name: str, width: int, folder: Path) -> nn.Module:
    fields = json.loads((write_config(name, folder) / "config.json").read_text())
    modules = skeleton(foreign_config(fields).document, "auto").modules()
    norm: nn.Module = next(m for m in modules if type(m).__name__.endswith("RMSNorm"))
    norm._parameters["weight"] = nn.Parameter(torch.linspace(-0.5, 1.5, width, device=DEVICE))
    return norm


def found(norm: nn.Module, x: Tensor, *, theirs: bool = False) -> list[Tensor]:
    """Result, and the gradients of x and the weight."""
    forward: Any = type(norm).__mro__[theirs]
    x, weight = x.clone().requires_grad_(), norm.get_parameter("weight")
    y: Tensor = forward.forward(norm, x)
    of_y = torch.linspace(-1.0, 1.0, y.numel(), device=DEVICE).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), of_y)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["phi3", "gemma2", "olmo2", "gpt_oss"])
def test_it_is_transformers_own(name: str, dtype: torch.dtype, shape: str, tmp_path: Path) -> None:
    sizes = SHAPES[shape]
    norm = norm_of(name, sizes[-1], tmp_path)
    assert type(norm).__name__ == type(norm).__mro__[1].__name__
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    exact = found(norm, x.float(), theirs=True)
    both = found(norm, x), found(norm, x, theirs=True)
    for ours, own, most in zip(*both, exact, strict=True):
        assert ours.dtype is own.dtype
        off = [float((each.float() - most).norm() / most.norm()) for each in (ours, own)]
        assert off[0] < (1e-5 if dtype is torch.float32 else 1e-2)
        assert off[0] < 2 * off[1] + 1e-6  # no less exact than theirs
