"""Exported graphs of each family against PyTorch; what is refused, and that it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from test_exchange_families import CASES, randomise, saved_run
from test_lora import LLAMA, LORA, drawn, write_run

from launcher.checkpoint.pretrained.weight_files import new_folder
from launcher.model.config import ModelConfig
from launcher.model.decode import continuation
from launcher.model.gpt import GPT
from launcher.tools.exchange import export_cli
from launcher.tools.serve.check import check_graph
from launcher.tools.serve.graph import (
    empty_past,
    hidden_keys,
    input_names,
    output_names,
    write_graph,
)
from launcher.tools.serve.runtime import onnx_session
from launcher.tools.serve.tensorrt import profile, trtexec
from launcher.util.errors import UserError

CONTEXT, PROMPT, MOST = 64, 7, 50
# Every family, in one of both forms. A cached one has layers, more than one for one family, and the
# seed of a model that does not repeat itself whatever it is asked.
CACHED = {"gpt2": (2, 2), "mistral": (1, 1), "qwen3": (1, 1)}
WHOLE = ("llama scaled", "qwen2 tied, window", "starcoder2")
ROOT = Path(__file__).parents[3]

# "Y" in docs/operators.md of onnx/onnx-tensorrt, release 10.1 (96e7811): what the ONNX parser of
# TensorRT 10.1 takes, of operator sets 9 to 20.
OF_TENSORRT = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization
    Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh
    CumSum DeformConv DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp
    Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
    GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization GRU
    HardSigmoid HardSwish Hardmax Identity If ImageScaler InstanceNormalization IsInf IsNaN
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop LRN LSTM LpNormalization
    LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg
    NonMaxSuppression NonZero Not OneHot Or Pad ParametricSoftplus Pow PRelu QuantizeLinear
    RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1
    ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    ReduceSumSquare Relu Reshape Resize ReverseSequence RNN RoiAlign Round ScaledTanh Scan
    Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu
    Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""


def config_of(case: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**CASES[case][1], "context": CONTEXT, **changes})


def model_of(config: ModelConfig, seed: int = 1) -> GPT:
    model = GPT(config).eval().requires_grad_(False)
    randomise(model, seed)
    return model


def operators(path: Path) -> set[str]:
    document = onnx.load(path, load_external_data=False)
    assert [entry.domain for entry in document.opset_import] == [""]
    assert document.opset_import[0].version <= 20
    assert not document.functions
    return {node.op_type for node in document.graph.node}


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("masked", [True, False])
def test_keys_are_hidden_where_the_tokens_are(masked: bool) -> None:
    """Any device but the CPU stands for a GPU, on which the walk is compiled."""
    meta = torch.device("meta")
    mask = torch.ones(2, 5, dtype=torch.int64, device=meta) if masked else None
    found = hidden_keys(config_of("mistral"), 2, 3, mask, meta)
    assert (found.device, found.shape) == (meta, (2 if masked else 1, 1, 3, 5))


@pytest.mark.parametrize("case", CACHED)
def test_a_graph_with_a_cache_is_the_model(case: str, tmp_path: Path) -> None:
    layers, seed = CACHED[case]
    config = config_of(case, layers=layers)
    model, path = model_of(config, seed), tmp_path / "model.onnx"
    write_graph(model, path, cache=True)
    session = onnx_session(path, config, cache=True)
    for batch in range(1, 6):
        for length in (1, 9, CONTEXT):
            ids = tokens(batch, length, config.vocab_size)
            found, present = session.extend(ids, empty_past(model, batch))
            assert (found - model(ids)).abs().max() <= 1e-4
            assert present[-1][0].shape == (batch, config.kv_head_count, length, config.head_size)

    prompt = tokens(1, PROMPT, config.vocab_size)
    expected = list(
        continuation(model, prompt[0].tolist(), lambda logits: int(logits.argmax()), most=MOST)
    )
    ids, past = prompt, empty_past(model, 1)
    decoded = []
    for _ in range(MOST):
        logits, past = session.extend(ids, past)
        ids = logits[:, -1:].argmax(-1)
        decoded.append(int(ids))
    assert decoded == expected
    assert len(set(expected)) > 5
    assert operators(path) <= set(OF_TENSORRT.split())
    document = onnx.load(path)
    assert [value.name for value in document.graph.input] == input_names(config, cache=True)
    assert [value.name for value in document.graph.output] == output_names(config, cache=True)
    assert str(ROOT).encode() not in path.read_bytes()


@pytest.mark.parametrize("case", WHOLE)
def test_a_graph_of_whole_sequences_is_the_model(case: str, tmp_path: Path) -> None:
    config = config_of(case, layers=1)
    model, path = model_of(config), tmp_path / "model.onnx"
    write_graph(model, path, cache=False, most_file_bytes=0 if case == "starcoder2" else 2**30)
    beside = tmp_path / "model.onnx.data"
    assert beside.exists() == (case == "starcoder2")
    session = onnx_session(path, config, cache=False)
    for batch in range(1, 6):
        for length in (1, 9, CONTEXT):
            ids = tokens(batch, length, config.vocab_size)
            assert (session.score(ids) - model(ids)).abs().max() <= 1e-4
    assert operators(path) <= set(OF_TENSORRT.split())
    document = onnx.load(path)
    held = [tensor for tensor in document.graph.initializer if tensor.data_type == 1]
    elements = sum(onnx.numpy_helper.to_array(tensor).size for tensor in held)
    constants = CONTEXT  # frequencies, scales
    assert config.parameter_count <= elements < config.parameter_count + constants


def test_padding_before_a_prompt_changes_nothing(tmp_path: Path) -> None:
    """Nor does it give what is no number, and without the mask it would."""
    config = config_of("mistral", layers=1)
    model, path = model_of(config), tmp_path / "model.onnx"
    write_graph(model, path, cache=True)
    session = onnx_session(path, config, cache=True)
    ids = tokens(2, 12, config.vocab_size)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past = empty_past(model, 2)
    padded, _ = session.extend(ids, past, mask=mask, positions=positions)
    alone = model(ids[:1, 9:])
    assert (padded[:1, 9:] - alone).abs().max() <= 1e-4
    assert padded.isfinite().all()
    unmasked, _ = session.extend(ids, past, positions=positions)
    assert (unmasked[:1, 9:] - alone).abs().max() > 1e-2

    # The check finds a graph that computes something else.
    document = onnx.load(path)
    weight = next(t for t in document.graph.initializer if t.name.endswith("qkv.weight"))
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0, 0] += 0.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(document, path)
    with pytest.raises(UserError, match="logits differ from PyTorch's by"):
        check_graph(path, model, cache=True)


def verb(*arguments: Any) -> int:
    return export_cli.main([str(argument) for argument in arguments])


def test_merged_adapters_beside_a_quantised_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**LLAMA, "d_model": 64, "d_ff": 128}
    config = ModelConfig(**shape, lora=LORA, quantize_base="nf4")
    model = drawn(config, b_std=0.1).eval()
    write_run(tmp_path / "run", model)
    out = tmp_path / "out"
    flags = ("--format", "onnx", "--no-cache", "--tokenizer", "none", "--out", out)
    assert verb(tmp_path / "run", *flags) == 2
    assert "give --merge for merged weights" in capsys.readouterr().err
    assert verb(tmp_path / "run", *flags, "--adapter") == 2
    assert "--adapter is PEFT's format, not --format onnx" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    assert verb(tmp_path / "run", *flags, "--merge") == 0
    said = capsys.readouterr().out
    assert "equal to PyTorch within" in said
    assert "sequence 1 to 32" in said
    whole = ModelConfig(**shape)
    ids = tokens(2, 32, 257)
    found = onnx_session(out / "model.onnx", whole, cache=False).score(ids)
    assert (found - model(ids)).abs().max() <= 1e-4
    described = json.loads((out / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]

    assert verb(tmp_path / "run", *flags, "--merge") == 2
    assert f"{out}" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    shape = {**CASES["gpt2"][1], "vocab_size": 257, "layers": 1, "window": 5}
    saved_run(folder, ModelConfig(**shape))
    return folder


def test_half_precision_says_what_has_been_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a model that no family of transformers has."""
    flags = ("--format", "onnx", "--no-cache")
    assert verb(run, *flags, "--dtype", "bf16", "--out", tmp_path / "bf16") == 0
    said = capsys.readouterr().out
    assert "not run: ONNX Runtime has no CPU kernels for bfloat16" in said
    assert "no config.json (transformers has no such model)" in said
    assert not (tmp_path / "bf16" / "config.json").exists()
    assert (tmp_path / "bf16" / "tokenizer.json").exists()
    assert verb(run, *flags, "--dtype", "fp16", "--out", tmp_path / "fp16") == 0
    assert "equal to PyTorch within" in capsys.readouterr().out


def test_what_fp16_cannot_hold_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig(**{**CASES["gpt2"][1], "vocab_size": 257, "layers": 1})
    model = model_of(config).requires_grad_()
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.fc.weight")[0, 0] = 1e6
    write_run(tmp_path / "run", model)
    flags = ("--format", "onnx", "--dtype", "fp16", "--tokenizer", "none")
    assert verb(tmp_path / "run", *flags, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == (
        "shardscale: --dtype fp16: blocks.0.mlp.fc.weight has values beyond 65504; use bf16\n"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_an_export_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    def ended() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "model.onnx").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        ended()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tensorrt_is_asked_for_where_it_is_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(run, "--format", "tensorrt", "--out", tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shardscale: --format tensorrt needs ")
    assert "a GPU, missing on this machine: write --format onnx here" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out.startswith("trtexec --onnx=model.onnx --saveEngine=model.engine ")
    assert "--optShapes=input_ids:1x1,attention_mask:1x13,position_ids:1x1," in captured.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cache", [True, False])
def test_an_engine_is_built_for_sizes_that_go_together(cache: bool) -> None:
    config = config_of("mistral")
    shapes = profile(config, cache=cache)
    assert list(shapes) == input_names(config, cache=cache)
    for number in range(3):
        size = {name: shape[number] for name, shape in shapes.items()}
        batch, length = size["input_ids"]
        assert {shape[0] for shape in size.values()} == {batch}
        if cache:
            before = size["past_key_values.1.value"][2]
            assert size["attention_mask"] == (batch, before + length)
    assert trtexec(shapes, "g", "e").count("Shapes=") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--format", "onnx", "--dtype", "fp8"), "fp8"),
        (("--format", "onnx", "--merge"), "has no adapters"),
        (("--format", "onnx", "--tokenizer", "nowhere.json"), "nowhere.json"),
        (("--format", "torchscript"), "torchscript"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused(
    flags: tuple[str, ...], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(run, *flags, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_its_packages_a_graph_is_refused(run: Path, tmp_path: Path) -> None:
    """Python's own finder of what is installed, less one name."""
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @staticmethod\n"
        "    def find_distributions(*context):\n"
        "        hidden = context[0].name == 'onnxruntime'\n"
        "        return () if hidden else PathFinder.find_distributions(*context)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "export", str(run), "--format", "onnx", "--out", "out"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(hiding), str(ROOT)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("shardscale: --format onnx needs onnxruntime: pip install -e '")
    assert not (tmp_path / "out").exists()
