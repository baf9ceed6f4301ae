"""AdamW whose moments, or weights, are stored in fewer bits than fp32, in which it computes.

No library's works with every strategy: torchao's 8-bit AdamW silently keeps fp32
moments where a (sharded) tensor is no multiple of its block, needs a C++ compiler on CPUs, and its
moments have the type of the weight; and stochastic rounding, which it has for bf16 weights, lets
the replicas of DDP drift apart, each with random numbers of its own.
"""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from launcher.optim.blockwise import BLOCK_ELEMENTS, dequantize, quantize, scale_count
from launcher.optim.choice import Moments
from launcher.optim.dtensor import local_part
from launcher.optim.entry import COUNTER_BYTES, MOMENTS, OptimizerCosts

SMALLEST_QUANTIZED: Final = 4096
"""Tensors with fewer elements (biases, norms) keep fp32 moments, as in bitsandbytes and torchao."""
_CHUNK_ELEMENTS: Final = 2**22
_PIECE_ELEMENTS: Final = 2**20
"""Elements that a checkpoint reads at a time; decoding them takes 11 MiB."""
assert _PIECE_ELEMENTS % BLOCK_ELEMENTS == 0


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW in fp32 arithmetic over weights and moments of lower precision.

    A bf16 weight gets a second bf16 number with its rounding error (Kahan's compensation, kept
    between steps): twice the 8 bits, so that updates down to about 2^-17 of the weight add up.
    It updates any range of a parameter that a rank holds: on a GPU in one kernel; elsewhere about 4
    million elements at a time, which bounds the fp32 copies.

    Args:
        params: as for any torch optimizer; fp32 or bf16.
        lr, betas, eps, weight_decay: as torch.optim.AdamW's.
        moments: storage of both moments. The blocks of 8-bit moments begin at the local range, so
            each sharding rounds differently.
        compensation: give a bf16 weight its second number. Without it an update is rounded to the
            nearest bf16, and lost below half of the weight's last bit.
    """

    found_inf: Tensor | None = None
    """Set as for torch's fused optimizers: a scalar, 1 if a gradient is not finite."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Moments,
        compensation: bool = True,
    ) -> None:
        self._moments = moments
        self._compensation = compensation
        # "fused", as with torch's own, says that `step` itself minds `found_inf`.
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter that has a gradient, unless `found_inf` is 1.

        On a GPU the device decides that, without the host waiting; states are created anyway.
        """
        assert closure is None
        found_inf = self.found_inf
        updates = [
            (parameter, group, self._state_of(parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        counters = [state["step"] for _, _, state in updates if isinstance(state["step"], Tensor)]
        if counters:  # on the device, where only it knows whether the step counts
            # A list, as a single tensor would be read by the host first.
            counted = 1.0 if found_inf is None else [1.0 - found_inf] * len(counters)
            torch._foreach_add_(counters, counted)
        elif found_inf:
            return
        for parameter, group, state in updates:
            weight, gradient = _flat(parameter), _flat(parameter.grad)
            if isinstance(state["step"], Tensor):
                from launcher.optim import kernels

                kernels.update(weight, gradient, state, group, found_inf)
            else:
                _update(weight, gradient, state, group)

    def pieces(self, parameter: Tensor, kind: str, *, filled: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield `param`, `exp_avg` or `exp_avg_sq` of this rank's range as (number of the first
        element, flat values in fp32), about a million at a time: views where it is stored in fp32,
        else copies, which are stored when the next piece is asked for, if they are `filled`."""
        for part in _chunks(local_part(parameter).numel(), _PIECE_ELEMENTS):
            values = self._read(parameter, kind, part)
            yield part.start, values
            if filled:
                self._write(parameter, kind, part, values)

    def _read(self, parameter: Tensor, kind: str, part: slice) -> Tensor:
        state = self.state[parameter]
        if kind in MOMENTS:
            return _load(state, kind, part)
        weight = _flat(parameter)
        value = _load_weight(weight, state, part)
        if "compensation" in state:
            # A value half-way between two bf16 numbers may be rounded to the other one when written
            # back: moved by one fp32 bit towards the weight, both parts are restored exactly.
            nearer = weight[part].float()
            torch.nextafter(value, nearer, out=nearer)
            kept = value.to(weight.dtype) == weight[part]
            torch.where(kept, value, nearer, out=value)
        return value

    def _write(self, parameter: Tensor, kind: str, part: slice, values: Tensor) -> None:
        state = self.state[parameter]
        if kind in MOMENTS:
            _store(state, kind, part, values)
        else:
            _store_weight(_flat(parameter), state, part, values)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self._new_state(_flat(parameter)))
        return state

    def _new_state(self, weight: Tensor) -> dict[str, Any]:
        # A counter that a kernel reads is on the device, as those of torch's fused optimizers.
        step = weight.new_zeros((), dtype=torch.float32) if _has_kernel(weight) else 0
        state: dict[str, Any] = {"step": step}
        quantized = self._moments == "int8" and weight.numel() >= SMALLEST_QUANTIZED
        dtype = torch.bfloat16 if self._moments == "bf16" else torch.float32
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(weight, dtype=torch.uint8 if quantized else dtype)
            if quantized:
                # Until they are first stored, codes are scaled by 0, and so stand for 0.
                state[_scale(kind)] = weight.new_zeros(scale_count(weight.numel()), dtype=dtype)
        if self._compensation and weight.dtype == torch.bfloat16:
            state["compensation"] = torch.zeros_like(weight)
        return state


def _has_kernel(weight: Tensor) -> bool:
    # Triton's interpreter, for tests, also takes tensors on a CPU.
    if not weight.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return importlib.util.find_spec("triton") is not None


def _update(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["step"] += 1
    lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
    # bias corrections: the first moment's in the rate, the root of the second's as a divisor
    rate = lr / (1 - beta1 ** state["step"])
    scale = (1 - beta2 ** state["step"]) ** 0.5
    for part in _chunks(weight.numel()):
        g = gradient[part].float()
        first = _load(state, "exp_avg", part).lerp_(g, 1 - beta1)
        second = _load(state, "exp_avg_sq", part).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        value = _load_weight(weight, state, part).mul_(1 - lr * group["weight_decay"])
        value.addcdiv_(first, (second.sqrt() / scale).add_(eps), value=-rate)
        _store(state, "exp_avg", part, first)
        _store(state, "exp_avg_sq", part, second)
        _store_weight(weight, state, part, value)


def costs(
    elements: int, *, moments: Moments, bf16_weight: bool, compensation: bool, on_gpu: bool
) -> OptimizerCosts:
    """Return the costs of a range of `elements`.

    On a GPU one kernel reads the gradient once, and reads and writes everything else once.

    On a CPU the kernels read and write, as counted, 80 bytes per element in fp32, plus conversions
    of moments, weight and gradient, plus 26 with compensation. They hold in fp32 per element of a
    chunk both moments, the root of the second and the quotient; beside a bf16 weight also gradient
    and weight. Quantizing holds moments, scaled values and 8-byte codes, 25 bytes, and scales.
    """
    chunk, scales = min(elements, _CHUNK_ELEMENTS), 0
    states = [(2 if moments == "bf16" else 4) * elements] * 2
    held = 8 if moments == "fp32" else 16
    if moments == "int8" and elements >= SMALLEST_QUANTIZED:
        states = [elements, 4 * scale_count(elements)] * 2
        held, scales = 25, 4 * scale_count(chunk)
    elif moments == "int8":
        held = 8
    compensated = bf16_weight and compensation
    states += [2 * elements] if compensated else []
    weight = 2 if bf16_weight else 4
    if on_gpu:
        return OptimizerCosts(
            states_bytes=(COUNTER_BYTES, *states),
            update_bytes=2 * sum(states) + 3 * weight * elements,
        )
    converting = {"fp32": 0.0, "bf16": 24.0, "int8": 174.5}[moments]
    converting += (18 if bf16_weight else 0) + (26 if compensated else 0)
    return OptimizerCosts(
        states_bytes=tuple(states),
        update_bytes=int((80 + converting) * elements),
        temporary_bytes=(held + (8 if bf16_weight else 0)) * chunk + scales,
    )


def _flat(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().reshape(-1)


def _chunks(elements: int, most: int = _CHUNK_ELEMENTS) -> Iterator[slice]:
    for begin in range(0, elements, most):
        yield slice(begin, min(elements, begin + most))


def _scale(kind: str) -> str:
    return f"{kind}_scale"


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK_ELEMENTS, scale_count(part.stop))


def _load(state: dict[str, Any], kind: str, part: slice) -> Tensor:
    stored: Tensor = state[kind][part]
    if stored.dtype == torch.uint8:
        scales = state[_scale(kind)][_blocks(part)]
        return dequantize(stored, scales, signed=kind == "exp_avg")
    return stored.float()


def _store(state: dict[str, Any], kind: str, part: slice, values: Tensor) -> None:
    stored: Tensor = state[kind][part]
    if stored.dtype == torch.uint8:
        codes, scales = quantize(values, signed=kind == "exp_avg")
        stored.copy_(codes)
        state[_scale(kind)][_blocks(part)].copy_(scales)
    elif stored.dtype != torch.float32:  # else `_load` has returned a view, which is up to date
        stored.copy_(values)


def _load_weight(weight: Tensor, state: dict[str, Any], part: slice) -> Tensor:
    value = weight[part].float()
    return value.add_(state["compensation"][part]) if "compensation" in state else value


def _store_weight(weight: Tensor, state: dict[str, Any], part: slice, value: Tensor) -> None:
    if "compensation" in state:
        weight[part].copy_(value)
        state["compensation"][part].copy_(value - weight[part])
    elif weight.dtype != torch.float32:  # as moments
        weight[part].copy_(value)
