"""Measurements of one rank for a profile, all ranks at the same time.

Rates come from the model's own shapes, and count FLOPs and bytes as a recorded trace does
(launcher/forecast/trace/counting.py), so that a prediction divides by what was measured in the
same unit.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from launcher.config.rules import default_seq_len
from launcher.forecast.collectives import fit_rate
from launcher.forecast.disk import disk_rates
from launcher.forecast.machine import COLLECTIVES
from launcher.forecast.on_gpu import achieved_flops_per_s
from launcher.forecast.trace.counting import work_of_call
from launcher.forecast.traffic import Collective
from launcher.forecast.workloads import captured, elementwise, linear_products, linears
from launcher.measure.hardware import find_gpu
from launcher.model.config import ModelConfig
from launcher.util.sizes import MIB

_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of each measurement."""

    seconds: float = 0.7
    """For each rate, after one warm-up (and at least three times)."""
    flops: float = 20e9
    """FLOPs of one pass over a block and the head, or over attention, which decide its size."""
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
        on_gpu = device.type == "cuda"
        self.gpu = find_gpu(torch.cuda.get_device_name(device)) if on_gpu else None
        """Its entry in the table, if any, so that rates are of products of any shape."""
        # 2 FLOPs per weight forward, 4 backward
        of_block = sum(inner * outer for inner, outer in model.linear_shapes)
        per_token = 6 * (of_block + model.vocab_size * model.d_model)
        rows, seq_len = max(int(effort.flops / per_token), _FEW_ROWS), default_seq_len(model)
        self.rows = min(rows, (32 if on_gpu else 8) * seq_len)
        self.head_rows = min(rows, 8 * seq_len)
        """Logits of more would not fit on a small GPU."""

    def run(self, disk_folder: Path | None) -> dict[str, Any]:
        """Everything; the names are fields of `Machine`."""
        types, copy = self._types(), self.copy_bytes_per_s()
        found: dict[str, Any] = {
            "matmul_flops_per_s": {name: self.matmul_flops_per_s(name, copy) for name in types},
            "attention_flops_per_s": {name: self.attention_flops_per_s(name) for name in types},
            "elementwise_bytes_per_s": self.elementwise_bytes_per_s(),
            "copy_bytes_per_s": copy,
            "operator_s": self.operator_s(),
            "host_to_device_bytes_per_s": self.transfer_bytes_per_s(to_device=True),
            "device_to_host_bytes_per_s": self.transfer_bytes_per_s(to_device=False),
            "cpu_adam_parameters_per_s": self.cpu_adam_parameters_per_s(),
            "collectives": self.collectives() if dist.is_initialized() else None,
        }
        if disk_folder is not None:
            written, read, _ = disk_rates(disk_folder, self.effort.disk_bytes)
            self.say(f"disk: {read / 1e9:,.2f} GB/s read, {written / 1e9:,.2f} GB/s written")
            found |= {"disk_read_bytes_per_s": read, "disk_write_bytes_per_s": written}
        return found

    def matmul_flops_per_s(self, name: str, copy_bytes_per_s: float) -> float:
        """Forward, input gradient and weight gradient of all linears of the model; on a GPU of the
        table what it would be if no multiprocessor were idle."""
        model, dtype = self.model, _dtype(name)
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        seconds, products = 0.0, []
        for times, shapes, rows in (
            (model.layers, model.linear_shapes, self.rows),
            (1, [(model.d_model, model.vocab_size)], self.head_rows),
        ):
            seconds += times * self._time_kernels(linears(shapes, rows, dtype, self.device))
            products += times * linear_products(shapes, rows, dtype.itemsize)
        rate = sum(product.flops for product in products) / seconds
        if self.gpu is not None:
            rate = achieved_flops_per_s(products, seconds, self.gpu, copy_bytes_per_s)
        self.say(f"matmul, {name}: {rate / 1e9:,.0f} GFLOP/s")
        return rate

    def attention_flops_per_s(self, name: str) -> float:
        """Forward and backward of causal attention over whole sequences; 2.5 times the forward's
        FLOPs in the backward, and half of the scores, as a recorded trace counts them."""
        model, seq_len = self.model, default_seq_len(self.model)
        # 4: two products, two FLOPs for each pair of elements
        flops_of_head = 3.5 * 4 * model.head_size * seq_len / 2 * seq_len
        heads = min(max(int(self.effort.flops / flops_of_head), 1), 8 * model.heads)
        shape = (1, heads, seq_len, model.head_size)
        q, k, v = (
            torch.randn(shape, dtype=_dtype(name), device=self.device, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.randn(shape, dtype=_dtype(name), device=self.device)

        def forward_and_backward() -> None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), gradient)

        rate = heads * flops_of_head / self._time_kernels(forward_and_backward)
        self.say(f"attention, {name}: {rate / 1e9:,.0f} GFLOP/s")
        return rate

    def elementwise_bytes_per_s(self) -> float:
        """Time what a block has besides matmuls and attention, forward and backward in fp32."""
        call = elementwise(self.model, self.rows, self.device)
        work = work_of_call(call)
        rate = (work.elementwise_bytes + work.copied_bytes) / self._time_kernels(call)
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
        """Starting an operator under autograd: those of a block beside its products on a GPU, whose
        kernels are too short to be waited for; on a CPU as many views as sums."""
        if self.device.type == "cuda":
            call = elementwise(self.model, _FEW_ROWS, self.device)
            seconds = self._time(call) / work_of_call(call).operators
        else:
            x = torch.ones(16, requires_grad=True)

            def operators() -> None:
                y = x
                for _ in range(200):
                    y = (y.view(4, 4) + 1.0).view(16) + 1.0

            seconds = self._time(operators) / 800  # 200 times 2 views and 2 sums
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

    def collectives(self) -> dict[str, dict[str, float]]:
        """The collectives that a run can use, over several sizes: a `Rate`'s fields."""
        rates: dict[str, dict[str, float]] = {}
        sizes, ranks = self.effort.collective_bytes, dist.get_world_size()
        for kind in COLLECTIVES:
            seconds = [self._collective_s(kind, size) for size in sizes]
            rate = fit_rate(kind, sizes, seconds, ranks=ranks)
            rates[kind] = dataclasses.asdict(rate)
            bus, least_us = rate.bytes_per_s / 1e9, seconds[0] * 1e6
            self.say(f"{kind.replace('_', '-')}: {bus:,.2f} GB/s, {least_us:,.0f} us at least")
        return rates

    def _types(self) -> tuple[str, ...]:
        if self.device.type == "cpu":
            return ("fp32", "bf16")
        if torch.cuda.get_device_capability(self.device)[0] < 8:
            return ("fp32", "fp16")
        return ("fp32", "tf32", "bf16")

    def _collective_s(self, kind: Collective, size_bytes: int) -> float:
        ranks = dist.get_world_size()
        own = torch.ones(max(1, size_bytes // 4 // ranks), device=self.device)
        whole = torch.ones(own.numel() * ranks, device=self.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        }
        # All ranks have to repeat it as often as each other.
        return self._time(calls[kind], repeats=5)

    def _time_kernels(self, call: Callable[[], Any]) -> float:
        """Median seconds of `call` on the device alone: a GPU replays its kernels from a graph,
        since a slow host starts small ones later than they could run."""
        return self._time(call if self.device.type == "cpu" else captured(call))

    def _time(self, call: Callable[[], Any], *, repeats: int | None = None) -> float:
        """Median seconds of `call`, which all ranks begin together."""
        call()
        self._wait()
        if dist.is_initialized():
            dist.barrier()
        seconds: list[float] = []
        least_s = 0.0 if repeats is not None else self.effort.seconds
        while len(seconds) < (repeats or 3) or sum(seconds) < least_s:
            start = time.perf_counter()
            call()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _dtype(name: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
