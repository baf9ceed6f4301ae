"""What an update reads, writes and multiplies, against the operators that really run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from launcher.optim.choice import OptimChoice
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import OPTIMIZERS, build_optimizer

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bf16 moments": {"moments_dtype": "bf16"},
    "adamw, bf16-pure": {"precision": "bf16-pure"},
    "adamw, bf16-pure, no compensation": {"precision": "bf16-pure", "compensation": False},
    "adamw, bf16-pure, fp32 moments": {"precision": "bf16-pure", "moments_dtype": "fp32"},
    "adam": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd"},
    "sgd without momentum": {"optimizer": "sgd", "momentum": 0.0},
    "adafactor": {"optimizer": "adafactor"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adamw8bit, bf16-pure": {"optimizer": "adamw8bit", "precision": "bf16-pure"},
    "muon": {"optimizer": "muon"},
    "apollo": {"optimizer": "apollo", "apollo_rank": 48},
}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write: each argument and each result once. Views are free, and
    so are products, which their arithmetic bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        arguments = list(zip(schema.arguments, args, strict=False))
        aliased = [(a, value) for a, value in arguments if a.alias_info is not None]
        # A fused optimizer may unscale gradients in place, and does not without a scaler.
        written = [v for a, v in aliased if a.alias_info.is_write and a.name != "grads"]
        if schema.name in ("aten::mm", "aten::addmm") or (aliased and not written):
            return out
        read = [v for v in args if not (schema.name == "aten::copy_" and v is args[0])]
        self.total_bytes += _tensor_bytes(read) + _tensor_bytes(written or out)
        return out


def _tensor_bytes(values: Any) -> int:
    return sum({id(t): t.nbytes for t in tree_leaves(values) if isinstance(t, Tensor)}.values())


class Layers(nn.Module):
    """A matrix of a block, its transpose, an embedding and a long vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = [(256, 1024), (1024, 256)]
        self.blocks = nn.ModuleList(
            nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in hidden
        )
        self.embedding = nn.Parameter(torch.randn(512, 1024, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(2**18, dtype=dtype))


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_what_an_update_reads_writes_and_multiplies(fields: dict[str, Any]) -> None:
    choice = OptimChoice(**fields)
    module = Layers(dtypes(choice).stored)
    optimizer = build_optimizer(module, choice)
    steps: list[tuple[int, int]] = []
    for _ in range(2):  # states are born in the first
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        with FlopCounterMode(display=False) as flops, Traffic() as traffic:
            optimizer.step()
        steps.append((traffic.total_bytes, flops.get_total_flops()))
    entry = OPTIMIZERS[choice.optimizer]
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    costs = [entry.costs(name, shape, choice, "cpu") for name, shape in shapes]
    expected = sum(each.update_bytes for each in costs)
    assert steps[1][0] == pytest.approx(expected, rel=0.005)
    assert steps[1][1] == sum(each.update_flops + each.update_fp32_flops for each in costs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_torchs_adamw_moves_28_bytes_per_parameter(precision: Any) -> None:
    choice = OptimChoice(precision=precision)
    assert OPTIMIZERS["adamw"].costs("", (1000, 3), choice, "cpu").update_bytes == 28 * 3000
