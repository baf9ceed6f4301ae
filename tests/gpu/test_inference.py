"""Inference on a GPU: TensorRT's engines against PyTorch, and what `infer-bench` measures there."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint import Checkpointer
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.native import NativeEngine
from launcher.tools.exchange import export_cli
from launcher.tools.serve import infer_bench_cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
SHAPE: dict[str, Any] = {
    **{"vocab_size": 257, "context": 64, "layers": 2, "heads": 4, "kv_heads": 2, "d_model": 64},
    **{"d_ff": 128, "position": "rope", "norm": "rms", "activation": "swiglu", "window": 9},
    **{"bias": "none", "tied": False},
}
LLAMA = ModelConfig(**SHAPE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = GPT(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = NativeEngine(model, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000)))
    extra: Any = {"config": {"tokenizer": "byte", "data": str(text)}, "model": LLAMA}
    Checkpointer(tmp_path / "run" / "checkpoints").save(1, engine, extra)
    return tmp_path / "run"


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None or importlib.util.find_spec("onnx") is None,
    reason="needs tensorrt and onnx",
)
@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_an_engine_computes_what_pytorch_does(
    cache: str, dtype: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "engine"
    flags = ["--format", "tensorrt", "--dtype", dtype, cache, "--out", str(out)]
    assert export_cli.main([str(run), *flags]) == 0
    assert "model.engine equal to PyTorch within" in capsys.readouterr().out
    assert (out / "model.engine").stat().st_size > 0


def test_memory_is_what_torch_has_allocated(run: Path) -> None:
    flags = ["--engines", "pytorch", "compiled", "--weights", "fp32", "bf16", "--sequences", "3"]
    assert infer_bench_cli.main([str(run), *flags, "--prompt-tokens", "8"]) == 0
    found = json.loads((run.parent / "inference" / "inference.json").read_text())
    rows = {(row["engine"], row["weights"]): row for row in found["rows"]}
    assert all(row["reason"] is None for row in rows.values())
    for engine in ("pytorch", "compiled"):
        peaks = [rows[engine, weights]["peak_bytes"] for weights in ("fp32", "bf16")]
        assert LLAMA.parameter_count * 4 < peaks[0]
        assert peaks[1] < peaks[0]
