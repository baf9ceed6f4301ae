"""What one rank measures for a profile, all ranks at the same time.

Rates come from the model's own shapes, and count FLOPs and bytes as `launcher.plan.work` does, so
that a prediction divides by what was measured in the same unit.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.config import ModelConfig
from launcher.plan.link_benchmarks import disk_rates, fit_rate
from launcher.plan.machine import COLLECTIVES, Rate
from launcher.strategies.traffic import Collective

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured."""

    seconds: float = 0.7
    """For each rate, after one warm-up (and at least three times)."""
    flops: float = 20e9
    """Of one pass over a block and the head, or over attention, which decides how large it is."""
    copy_bytes: int = 128 * MIB
    """Larger than any cache."""
    disk_bytes: int = 256 * MIB
    collective_bytes: tuple[int, ...] = (64 * 2**10, MIB, 8 * MIB, 64 * MIB)
    adam_parameters: int = 8_000_000

    @classmethod
    def for_device(cls, device_type: str) -> "Effort":
        """GPUs need more work to show their rate."""
        if device_type == "cpu":
            return cls()
        return cls(
            flops=20e12,
            copy_bytes=1024 * MIB,
            disk_bytes=1024 * MIB,
            collective_bytes=(64 * 2**10, MIB, 16 * MIB, 256 * MIB),
            adam_parameters=50_000_000,
        )


class Bench:
    """One rank's measurements."""

    def __init__(
        self, model: ModelConfig, device: torch.device, effort: Effort, say: Callable[[str], None]
    ) -> None:
        self.model, self.device, self.effort, self.say = model, device, effort, say
        per_token = 6 * (self._block_matmuls() + model.vocab_size * model.d_model)
        self.rows = min(max(int(effort.flops / per_token), 16), 8 * model.context)

    def run(self, disk_folder: Path | None) -> dict[str, Any]:
        """Everything; the names are fields of `Machine`."""
        matmul = {name: self.matmul_flops_per_s(name) for name in self._types()}
        attention = {name: self.attention_flops_per_s(name) for name in self._types()}
        found: dict[str, Any] = {
            "matmul_flops_per_s": matmul,
            "attention_flops_per_s": attention,
            "elementwise_bytes_per_s": self.elementwise_bytes_per_s(),
            "copy_bytes_per_s": self.copy_bytes_per_s(),
            "operator_s": self.operator_s(),
            "host_to_device_bytes_per_s": self.transfer_bytes_per_s(to_device=True),
            "device_to_host_bytes_per_s": self.transfer_bytes_per_s(to_device=False),
            "cpu_adam_parameters_per_s": self.cpu_adam_parameters_per_s(),
            "collectives": self.collectives() if dist.is_initialized() else None,
        }
        if disk_folder is not None:
            rates = disk_rates(disk_folder, self.effort.disk_bytes)
            read, written = (rate / 1e9 for rate in rates.values())
            self.say(f"disk: {read:,.2f} GB/s read, {written:,.2f} GB/s written")
            found |= rates
        return found

    def matmul_flops_per_s(self, name: str) -> float:
        """Forward, input gradient and weight gradient of all linears of the model."""
        model, layers, dtype = self.model, self.model.layers, _dtype(name)
        block = [(model.d_model, 3 * model.d_model), (model.d_model, model.d_model)]
        block += [(model.d_model, model.ffn_dim), (model.ffn_dim, model.d_model)]
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        seconds = layers * self._time(_linears(block, self.rows, dtype, self.device))
        seconds += self._time(
            _linears([(model.d_model, model.vocab_size)], self.rows, dtype, self.device)
        )
        rate = 6 * self.rows * model.matmul_parameter_count / seconds
        self.say(f"matmul, {name}: {rate / 1e9:,.0f} GFLOP/s")
        return rate

    def attention_flops_per_s(self, name: str) -> float:
        """Forward and backward of causal attention over whole sequences; 2.5 times the forward's
        FLOPs in the backward, and half of the scores, as in `launcher.plan.work`."""
        model, seq_len = self.model, self.model.context
        flops_of_head = 3.5 * 4 * model.head_dim * seq_len / 2 * seq_len
        heads = min(max(int(self.effort.flops / flops_of_head), 1), 8 * model.heads)
        shape = (1, heads, seq_len, model.head_dim)
        q, k, v = (
            torch.randn(shape, dtype=_dtype(name), device=self.device, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.randn(shape, dtype=_dtype(name), device=self.device)

        def forward_and_backward() -> None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), gradient)

        rate = heads * flops_of_head / self._time(forward_and_backward)
        self.say(f"attention, {name}: {rate / 1e9:,.0f} GFLOP/s")
        return rate

    def elementwise_bytes_per_s(self) -> float:
        """What a block has besides matmuls and attention, forward and backward in fp32."""
        model = self.model
        x = torch.randn(self.rows, model.d_model, device=self.device, requires_grad=True)
        hidden = torch.randn(self.rows, model.ffn_dim, device=self.device, requires_grad=True)
        norm = nn.LayerNorm(model.d_model, device=self.device)
        gradients = torch.randn_like(x), torch.randn_like(hidden)

        def forward_and_backward() -> None:
            y = x + norm(x).view(-1, model.heads, model.head_dim).clone().view_as(x)
            y = y + norm(y)
            z = F.relu(hidden) if model.activation == "relu" else F.gelu(hidden, approximate="tanh")
            torch.autograd.grad((y, z), (x, hidden, norm.weight, norm.bias), gradients)

        elements = self.rows * (12 * model.d_model + 2 * model.ffn_dim)
        rate = 3 * 4 * elements / self._time(forward_and_backward)
        self.say(f"norms, activations, sums: {rate / 1e9:,.1f} GB/s")
        return rate

    def copy_bytes_per_s(self) -> float:
        """Read plus written, beyond the caches."""
        source = torch.ones(self.effort.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        rate = 2 * self.effort.copy_bytes / self._time(lambda: target.copy_(source))
        self.say(f"memory: {rate / 1e9:,.1f} GB/s")
        return rate

    def operator_s(self) -> float:
        """Starting an operator under autograd: as many views as sums."""
        x = torch.ones(16, device=self.device, requires_grad=True)
        times = 200

        def operators() -> None:
            y = x
            for _ in range(times):
                y = y.view(4, 4) + 1.0
                y = y.view(16) + 1.0

        seconds = self._time(operators) / (4 * times)
        self.say(f"starting an operator: {seconds * 1e6:.1f} us")
        return seconds

    def transfer_bytes_per_s(self, *, to_device: bool) -> float | None:
        """Between page-locked host memory and the GPU; None where the CPU is the device."""
        if self.device.type == "cpu":
            return None
        size = self.effort.copy_bytes
        host = torch.ones(size, dtype=torch.uint8).pin_memory()
        device = torch.empty(size, dtype=torch.uint8, device=self.device)
        target, source = (device, host) if to_device else (host, device)
        rate = size / self._time(lambda: target.copy_(source, non_blocking=True))
        self.say(f"{'to' if to_device else 'from'} the device: {rate / 1e9:,.1f} GB/s")
        return rate

    def cpu_adam_parameters_per_s(self) -> float:
        """Norm, clipping and a fused AdamW step in host memory."""
        count = self.effort.adam_parameters // 8
        parameters = [nn.Parameter(torch.ones(count)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones(count)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

        def step() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        rate = 8 * count / self._time(step)
        self.say(f"AdamW on the CPU: {rate / 1e6:,.0f} M parameters/s")
        return rate

    def collectives(self) -> dict[str, Rate]:
        """The three collectives that the strategies use, over several sizes."""
        rates: dict[str, Rate] = {}
        for kind in COLLECTIVES:
            seconds = [self._collective_s(kind, size) for size in self.effort.collective_bytes]
            rates[kind] = fit_rate(
                kind, self.effort.collective_bytes, seconds, ranks=dist.get_world_size()
            )
            bus = rates[kind].bytes_per_s / 1e9
            self.say(
                f"{kind.replace('_', '-')}: {bus:,.2f} GB/s, {seconds[0] * 1e6:,.0f} us at least"
            )
        return rates

    def _types(self) -> tuple[str, ...]:
        if self.device.type == "cpu":
            return ("fp32", "bf16")
        if torch.cuda.get_device_capability(self.device)[0] < 8:
            return ("fp32",)
        return ("fp32", "tf32", "bf16")

    def _block_matmuls(self) -> int:
        model = self.model
        head = model.vocab_size * model.d_model
        return (model.matmul_parameter_count - head) // model.layers

    def _collective_s(self, kind: Collective, size_bytes: int) -> float:
        ranks = dist.get_world_size()
        own = torch.ones(max(1, size_bytes // 4 // ranks), device=self.device)
        whole = torch.ones(own.numel() * ranks, device=self.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
        }
        # All ranks have to repeat it as often as each other.
        return self._time(calls[kind], repeats=5)

    def _time(self, call: Callable[[], Any], *, repeats: int | None = None) -> float:
        """Median seconds of `call`, which all ranks begin together."""
        call()
        self._wait()
        if dist.is_initialized():
            dist.barrier()
        seconds: list[float] = []
        while not self._enough(seconds, repeats):
            start = time.perf_counter()
            call()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _enough(self, seconds: Sequence[float], repeats: int | None) -> bool:
        if repeats is not None:
            return len(seconds) >= repeats
        return len(seconds) >= 3 and sum(seconds) >= self.effort.seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


def _linears(
    shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """All three matmuls of linears of (inputs, outputs) over `rows` tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    operands = [(random(rows, i), random(o, i), random(rows, o)) for i, o in shapes]

    def forward_and_backward() -> None:
        for inputs, weight, gradient in operands:
            inputs @ weight.t()
            gradient @ weight
            gradient.t() @ inputs

    return forward_and_backward
