"""Options of `shardscale infer-bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from launcher.util.errors import UserError
from launcher.util.flags import MOST_ITEMS, require_range

EngineName = Literal["pytorch", "compiled", "onnxruntime", "tensorrt"]
Weights = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InferBenchOptions:
    """Compare memory, latency and perplexity of runs in PyTorch, ONNX Runtime and TensorRT, on the
    same prompts and with each engine in its own process."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS...")] = ()
    """Run folders or checkpoints, trained on the same text with the same tokenizer."""
    out: Path | None = None
    """Output folder; must not exist yet (default: inference, beside the first run)."""
    engines: tuple[EngineName, ...] = ("pytorch", "compiled", "onnxruntime", "tensorrt")
    """Runtimes to compare."""
    weights: tuple[Weights, ...] = ("fp32", "bf16", "int8")
    """int8: projections with dynamically quantized inputs (torchao, or ONNX Runtime)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""
    prompts: int = 3
    """Number of prompts, taken from the validation text and decoded one at a time."""
    prompt_tokens: int = 32
    """Tokens per prompt."""
    new_tokens: int = 32
    """Tokens to decode per prompt, greedily."""
    repeats: int = 3
    """Repeats over all prompts."""
    sequences: int = 32
    """Validation sequences to compute perplexity on."""
    seed: int = 0
    """Seed of the prompts' positions."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("infer-bench needs runs: give run folders, for example runs/dense")
        for name, most in (("prompts", 1000), ("repeats", 1000), ("sequences", MOST_ITEMS)):
            require_range(f"--{name}", getattr(self, name), 1, most)
        require_range("--prompt-tokens", self.prompt_tokens, 1, MOST_ITEMS)
        require_range("--new-tokens", self.new_tokens, 2, MOST_ITEMS)
        require_range("--seed", self.seed, 0, 2**62)
