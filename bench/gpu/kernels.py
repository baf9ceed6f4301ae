"""Milliseconds of our kernels beside torch's own operators, at seed-134m's sizes, batch 125 x 256.

    python bench/gpu/kernels.py OUTPUT.json

Attention and loss forward and backward in bf16, updates of all parameters; medians of 20 calls
after 5, by CUDA events. What cannot run here is a row with its reason. Values are not compared
here: tests/gpu does that.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import is_null_gpu
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.model.attention import KERNELS
from launcher.model.loss import automatic_chunk_rows, linear_cross_entropy
from launcher.model.sizes import named
from launcher.optim.choice import OptimChoice
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import build_optimizer
from launcher.strategies.parameters import parameters_of

WARMUP, CALLS = 5, 20
BATCH, TOKENS = 125, 256
MODEL = named("seed-134m")
UPDATES = {
    "fp32 (torch's fused AdamW)": OptimChoice(),
    "bf16 moments": OptimChoice(moments_dtype="bf16", betas=(0.9, 0.99)),
    "8-bit moments": OptimChoice(optimizer="adamw8bit"),
    "bf16-pure": OptimChoice(precision="bf16-pure", betas=(0.9, 0.99)),
    "bf16-pure, 8-bit moments": OptimChoice(precision="bf16-pure", optimizer="adamw8bit"),
}
Case = tuple[str, Callable[[], Callable[[], object]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    rows: dict[str, dict[str, Any]] = {}
    for name, prepare in (*attention(), *loss(), *updates()):
        try:
            rows[name] = {"ms": milliseconds(prepare())}
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(name, rows[name], flush=True)
        output.write_text(json.dumps({"batch": BATCH, "tokens": TOKENS, "rows": rows}, indent=1))
        torch.cuda.empty_cache()


def milliseconds(call: Callable[[], object]) -> float | None:
    """None on the null GPU, where no kernel takes time."""
    for _ in range(WARMUP):
        call()
    times: list[float] = []
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return None if is_null_gpu() else round(statistics.median(times), 4)


def attention() -> Iterator[Case]:
    """Ours by kind, and torch's by backend."""
    shape = (BATCH, MODEL.heads, TOKENS, MODEL.d_model // MODEL.heads)

    def ready(function: Callable[..., Tensor]) -> Callable[[], object]:
        qkv = [random(*shape).requires_grad_() for _ in range(3)]
        direction = random(*shape)
        return lambda: torch.autograd.grad(function(*qkv), qkv, direction)

    def ours(kind: Any) -> Callable[[], object]:
        kernel = KERNELS[kind]
        mask = kernel.prepare(TOKENS, None, torch.device("cuda"), None, torch.bfloat16)
        return ready(partial(kernel.function, mask=mask, window=None, dropout=0.0))

    def theirs(backend: SDPBackend) -> Callable[[], object]:
        def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return ready(function)

    for kind in ("sdpa", "flash", "flex", "eager"):
        yield f"attention, {kind}", partial(ours, kind)
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for backend in (*backends, SDPBackend.EFFICIENT_ATTENTION):
        yield f"attention, torch's {backend.name}", partial(theirs, backend)


def loss() -> Iterator[Case]:
    """Ours in chunks, and torch's cross-entropy of whole logits, eager and compiled."""
    rows, vocab, d_model = BATCH * TOKENS, MODEL.vocab_size, MODEL.d_model
    chunk = automatic_chunk_rows(rows, vocab, d_model, fused=True)

    def ready(function: Callable[..., Tensor]) -> Callable[[], object]:
        hidden = random(rows, d_model).requires_grad_()
        weight = (random(vocab, d_model) / 8).requires_grad_()
        targets = torch.randint(0, vocab, (rows,), device="cuda")
        return lambda: torch.autograd.grad(function(hidden, weight, targets), (hidden, weight))

    def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    ours = partial(linear_cross_entropy, chunk_rows=chunk)
    yield f"loss, chunks of {chunk}", lambda: ready(ours)
    yield "loss, torch's, whole logits", lambda: ready(whole)
    yield "loss, torch's, compiled", lambda: ready(torch.compile(whole))


def updates() -> Iterator[Case]:
    """All parameters of the model, by optimizer."""

    def ready(choice: OptimChoice) -> Callable[[], object]:
        dtype = dtypes(choice).stored
        weights = [torch.zeros(p.shape, dtype=dtype, device="cuda") for p in parameters_of(MODEL)]
        optimizer: Any = build_optimizer(nn.ParameterList(weights), choice)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.found_inf = torch.zeros((), device="cuda")
        step: Callable[[], object] = optimizer.step
        return step

    for name, choice in UPDATES.items():
        yield f"update, {name}", partial(ready, choice)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
