"""Quantised weights: ours beside torchao's and bitsandbytes' NF4, where those are installed.

    python bench/quantized.py [--device cpu|cuda] [--output bench/results]

A matrix as a Llama has it, drawn from a normal distribution with rows of different size: how far it
is from itself afterwards, bytes per element with scales, and the time to make a bf16 matrix of it
again, all in turn, medians. Writes quantized.json and .md.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from runs import refuse_existing, table  # noqa: E402

from launcher.model.config import Quantization  # noqa: E402
from launcher.model.linears import dequantize, quantize  # noqa: E402

OUTER, INNER = 4096, 2048
ROUNDS = 15
Way = tuple[float, Callable[[], Tensor]]
"""Bytes per element, and what gives the matrix back."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    stem = options.output / ("quantized" if options.device == "cpu" else "quantized_cuda")
    refuse_existing(stem.with_suffix(".json"))
    torch.manual_seed(0)
    weight = torch.randn(OUTER, INNER) * (0.5 + torch.rand(OUTER, 1)) * 0.02
    weight = weight.to(options.device)
    ways: dict[str, Way] = {
        "nf4, ours": ours(weight, "nf4"),
        "int8, ours": ours(weight, "int8"),
        **torchaos(weight),
        **bitsandbytes_(weight),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (_, back) in ways.items():
            seconds[name].append(timed(back))
    rows = [
        {
            "name": name,
            "relative_error": float((back().float() - weight).norm() / weight.norm()),
            "bytes_per_element": size,
            "seconds": statistics.median(seconds[name]),
        }
        for name, (size, back) in ways.items()
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    result = {"device": options.device, "torch": torch.__version__, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(rows, options.device))
    print(markdown(rows, options.device))


def ours(weight: Tensor, kind: Quantization) -> Way:
    packed = quantize(weight, kind)
    back = dequantize
    return packed.numel() / weight.numel(), lambda: back(packed, INNER, kind, torch.bfloat16)


def torchaos(weight: Tensor) -> dict[str, Way]:
    try:
        from torchao.quantization import to_nf4
    except ImportError:
        return {}
    nf4 = to_nf4(weight.to(torch.bfloat16), 64, 256)
    parts = [getattr(nf4, name) for name in nf4.__tensor_flatten__()[0]]
    return {"nf4, torchao": (bytes_of(parts) / weight.numel(), nf4.get_original_weight)}


def bitsandbytes_(weight: Tensor) -> dict[str, Way]:
    try:
        import bitsandbytes.functional as library
    except ImportError:
        return {}
    codes, state = library.quantize_4bit(
        weight.to(torch.bfloat16), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    parts = [codes, state.absmax, state.state2.absmax, state.state2.code, state.code]
    size = bytes_of(parts) / weight.numel()
    return {"nf4, bitsandbytes": (size, lambda: library.dequantize_4bit(codes, state))}


def bytes_of(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timed(back: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    result = back()
    if result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def markdown(rows: list[dict[str, Any]], device: str) -> str:
    reference = rows[0]["seconds"]
    lines = [
        [
            row["name"],
            f"{row['relative_error']:.2%}",
            f"{row['bytes_per_element']:.4f}",
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['seconds'] / reference:.2f}",
        ]
        for row in rows
    ]
    titles = ["weights", "relative error", "bytes per element", "back to bf16, ms", "of ours"]
    head = f"# Quantised weights\n\nA matrix of {OUTER} x {INNER} on a {device}, as\n"
    return head + f"`bench/quantized.py` makes it.\n\n{table(titles, lines)}\n"


if __name__ == "__main__":
    main()
