"""The kernel of LowPrecisionAdamW against the same update in torch's own operators on the CPU.

`python tests/optim_kernel_cases.py`, with TRITON_INTERPRET=1, has Triton's interpreter run it, on
the CPU as well, and prints a line of JSON per case. On a GPU, `compared` is called as it is.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

from launcher.optim.blockwise import BLOCK_ELEMENTS, dequantize, levels, midpoints
from launcher.optim.choice import OptimChoice
from launcher.optim.low_precision import LowPrecisionAdamW, _update
from launcher.optim.registry import build_optimizer
from launcher.strategies.flat_shards import counters, set_counters

STEPS = 3
CHOICES = {
    "bf16 moments": OptimChoice(moments_dtype="bf16", betas=(0.9, 0.99)),
    "8 bits": OptimChoice(optimizer="adamw8bit"),
    "bf16-pure": OptimChoice(precision="bf16-pure", betas=(0.9, 0.99)),
    "bf16-pure, no compensation": OptimChoice(precision="bf16-pure", compensation=False),
    "bf16-pure, fp32 moments": OptimChoice(precision="bf16-pure", moments_dtype="fp32"),
    "bf16-pure, 8 bits": OptimChoice(precision="bf16-pure", optimizer="adamw8bit"),
    "8 bits of gradients alone": OptimChoice(optimizer="adamw8bit", betas=(0.0, 0.0)),
}
CASES = [(name, size) for name in CHOICES for size in (1, 255, 256, 257, 5000, 70_000)]

Tensors = dict[str, Tensor]


def compared(name: str, elements: int, device: str) -> dict[str, dict[str, float]]:
    """Per tensor its largest error, as a share of what rounding explains, and of a tensor in less
    than fp32 the share of elements that differ at all. Steps start from what the kernel has left.
    """
    choice = CHOICES[name]
    torch.manual_seed(0)
    dtype = torch.float32 if choice.arithmetic.keeps_fp32 else torch.bfloat16
    weight = nn.Parameter(torch.randn(1, elements).to(device, dtype))
    optimizer: Any = build_optimizer(nn.ParameterList([weight]), choice)
    assert isinstance(optimizer, LowPrecisionAdamW)
    steps = []
    for step in range(1, STEPS + 1):
        gradient = _gradient(elements, step).to(dtype)
        strided = torch.stack([gradient, gradient], dim=1).to(device)
        weight.grad = strided[:, 0].unsqueeze(0)
        if step < STEPS:
            _assert_skips(optimizer, weight)  # and makes the states
        before = _tensors(optimizer, weight)
        expected: dict[str, Any] = {key: tensor.clone() for key, tensor in before.items()}
        expected["step"] = step - 1
        _update(expected["weight"], gradient, expected, optimizer.param_groups[0])
        optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        assert optimizer.state[weight]["step"].item() == expected["step"] == step
        got = _tensors(optimizer, weight)
        steps.append({key: _difference(key, got, expected, before, gradient) for key in got})
    assert counters(optimizer, weight) == {"step": STEPS}
    set_counters(optimizer.state[weight], {"step": 1.0})  # as of a checkpoint from a CPU
    assert counters(optimizer, weight) == {"step": 1.0}
    return {
        key: {what: max(each[key][what] for each in steps) for what in ("error", "share")}
        for key in steps[0]
    }


def assert_rounded_alike(found: dict[str, dict[str, float]]) -> None:
    """Sums may be fused with products or not, which few of the stored bits show."""
    assert {"weight", "exp_avg", "exp_avg_sq"} <= set(found)
    for key, difference in found.items():
        assert difference["error"] < 1.001, key
        assert difference["share"] < 0.01, key


def _tensors(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensors:
    """Copies of the weight and its states but for the counter, flat."""
    state = {key: value for key, value in optimizer.state[weight].items() if key != "step"}
    tensors = {"weight": weight.detach().view(-1), **state}
    return {key: tensor.cpu().clone() for key, tensor in tensors.items()}


def _assert_skips(optimizer: Any, weight: Tensor) -> None:
    before, counted = _tensors(optimizer, weight), optimizer.state[weight].get("step", 0)
    counted = float(counted)
    optimizer.found_inf = torch.ones((), device=weight.device)
    optimizer.step()
    after = _tensors(optimizer, weight)
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert optimizer.state[weight]["step"].item() == counted


def _gradient(elements: int, step: int) -> Tensor:
    """Return a gradient of both signs and many sizes, with a block of nothing else than 0, and with
    what lies at the edge of a code: each block's largest is 1 or -1."""
    generator = torch.Generator().manual_seed(100 * step + elements)
    cpu = torch.device("cpu")
    edges = torch.cat([*(midpoints(s, cpu) for s in (True, False)), midpoints(False, cpu).sqrt()])
    edges = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1)])
    edges = torch.cat([edges, levels(True, cpu), levels(False, cpu)])
    values = 10.0 ** (8 * torch.rand(elements, generator=generator) - 8)
    values *= torch.randn(elements, generator=generator).sign()
    values[: min(elements, edges.numel())] = edges[:elements]
    values[::BLOCK_ELEMENTS] = 1.0 if step < STEPS else -1.0
    values[10 * BLOCK_ELEMENTS : 11 * BLOCK_ELEMENTS] = 0
    return values


def _difference(
    key: str, got: Tensors, expected: Tensors, before: Tensors, gradient: Tensor
) -> dict[str, float]:
    differs = (got[key] != expected[key]) & (got[key].dtype != torch.float32)
    share = differs.double().mean().item()
    if got[key].dtype == torch.uint8:
        signed = key == "exp_avg"
        error = _decoded(got, key, signed) - _decoded(expected, key, signed)
        table = levels(signed, torch.device("cpu"))
        gaps = torch.cat([table.diff(), table.diff()[-1:]])
        scales = expected[f"{key}_scale"].repeat_interleave(BLOCK_ELEMENTS)[: error.numel()]
        # As wide as its code, or the next one below.
        codes = expected[key].int()
        allowed = torch.maximum(gaps[codes], gaps[(codes - 1).clamp(min=0)]) * scales
    elif key.endswith("_scale"):
        error, allowed = got[key] - expected[key], 2**-22 * expected[key]
    else:
        error = got[key].double() - expected[key].double()
        weights = before["weight"].abs() + 10 * OptimChoice().recipe().lr  # and its update
        parts = {
            "exp_avg": torch.maximum(before["exp_avg"].abs().float(), gradient.abs().float()),
            "exp_avg_sq": expected["exp_avg_sq"],
            "weight": weights,
            "compensation": weights,
        }[key]
        # The last bit of what is stored, and those of the fp32 sums that lead there.
        rounding = torch.finfo(got[key].dtype).eps * expected[key].abs().double()
        allowed = rounding + 2**-22 * parts.abs().double()
    return {"error": (error.abs() / (allowed.abs() + 1e-38)).amax().item(), "share": share}


def _decoded(tensors: Tensors, key: str, signed: bool) -> Tensor:
    return dequantize(tensors[key], tensors[f"{key}_scale"], signed=signed)


def round_in_the_interpreter() -> None:
    """To the nearest bf16, as GPUs do: Triton's interpreter cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    InterpreterBuilder.cast_impl = rounding


if __name__ == "__main__":
    round_in_the_interpreter()
    for name, elements in CASES:
        found = compared(name, elements, "cpu")
        print(json.dumps({"case": name, "elements": elements, "found": found}), flush=True)
