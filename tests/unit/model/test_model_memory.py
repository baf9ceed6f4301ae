"""Live tensor bytes, counted by watching every storage that an operation returns."""

import weakref
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.model.config import AttentionKind, ModelConfig, Quantization
from launcher.model.gpt import GPT
from launcher.model.lora_config import Lora, LoraTarget
from launcher.model.loss import automatic_chunk_rows, linear_cross_entropy
from launcher.model.sizes import NAMED

CONFIG = ModelConfig(vocab_size=64, context=32, layers=4, heads=4, d_model=32)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages born inside the mode that are alive now, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def _track(self, value: Any, *, born_here: bool) -> None:
        for tensor in tree_leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size_bytes = storage._cdata, storage.nbytes() if born_here else 0
            if key not in self._known:
                self._known.add(key)
                self.live_bytes += size_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._free, key, size_bytes)

    def _free(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._track((args, kwargs), born_here=False)
        out = func(*args, **(kwargs or {}))
        self._track(out, born_here=True)
        return out


def _loss_peak_bytes(dtype: torch.dtype, chunk_rows: int) -> int:
    """Peak of loss and backward for the head of the 134M model on 4096 tokens, without memory."""
    config = NAMED["seed-134m"]
    with FakeTensorMode():
        hidden = torch.randn(4096, config.d_model, dtype=dtype, requires_grad=True)
        weight = torch.randn(config.vocab_size, config.d_model, dtype=dtype, requires_grad=True)
        targets = torch.zeros(4096, dtype=torch.int64)
        live = LiveBytes()
        with live:
            linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows).backward()
        return live.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_peaks_far_below_the_plain_one(dtype: torch.dtype) -> None:
    config = NAMED["seed-134m"]
    chunk_rows = automatic_chunk_rows(4096, config.vocab_size, config.d_model, fused=False)
    logits_bytes = 4 * 4096 * config.vocab_size
    plain, chunked = _loss_peak_bytes(dtype, 0), _loss_peak_bytes(dtype, chunk_rows)
    assert plain > 2 * logits_bytes
    assert chunked < logits_bytes
    assert chunked < 0.3 * plain


def _step(config: ModelConfig, tokens: Tensor) -> tuple[Tensor, list[Tensor], int]:
    """Loss, gradients, and the bytes that forward keeps for backward."""
    torch.manual_seed(0)
    model = GPT(config)
    with LiveBytes() as live:
        loss = model(tokens, tokens.roll(-1, 1))
        kept_bytes = live.live_bytes
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], kept_bytes


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_memory_and_nothing_else(
    attention: AttentionKind, dropout: float, autocast: bool
) -> None:
    config = replace(CONFIG, attention=attention, dropout=dropout, loss_chunk=24, window=20)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 32))
    steps = {}
    partly = ("every=2", "keep=mlp-up", "keep=qkv,attention", "full:1/none:2/keep=proj:1")
    for mode in ("none", "selective", "full", *partly):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            steps[mode] = _step(replace(config, activation_checkpointing=mode), tokens)
    for mode in ("selective", "full", *partly):
        torch.testing.assert_close(steps[mode][:2], steps["none"][:2], rtol=1e-7, atol=1e-8)
    assert steps["full"][2] < steps["selective"][2] < steps["none"][2]
    assert all(steps["full"][2] < steps[mode][2] < steps["none"][2] for mode in partly)


def test_selective_survives_a_linear_that_adds_its_bias_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed's zero.Init replaces F.linear so, for the rest of the process."""
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    monkeypatch.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 32))
    none = _step(CONFIG, tokens)
    selective = _step(replace(CONFIG, activation_checkpointing="selective"), tokens)
    torch.testing.assert_close(selective[:2], none[:2], rtol=1e-7, atol=1e-8)


class CountMatmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in {"mm", "addmm", "bmm"} or (
            "attention" in func.overloadpacket.__name__
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("d_ff", [None, CONFIG.d_model])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_selective_recomputes_no_matmul_and_no_attention(
    attention: AttentionKind, d_ff: int | None
) -> None:
    counts = {}
    for mode in ("none", "selective", "full"):
        config = replace(
            CONFIG, activation_checkpointing=mode, attention=attention, d_ff=d_ff, loss_chunk=24
        )
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with CountMatmuls() as matmuls:
            GPT(config)(tokens, tokens).backward()
        counts[mode] = matmuls.count
    assert counts["selective"] == counts["none"] < counts["full"]


@pytest.mark.parametrize("d_ff", [None, CONFIG.d_model])
def test_a_product_that_is_not_kept_is_multiplied_once_more(d_ff: int | None) -> None:
    """Also where two matrices have one shape. Of the last, nothing is."""

    def count(mode: str) -> int:
        config = replace(CONFIG, activation_checkpointing=mode, d_ff=d_ff, loss_chunk=24)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with CountMatmuls() as matmuls:
            GPT(config)(tokens, tokens).backward()
        total: int = matmuls.count
        return total

    none, layers = count("none"), CONFIG.layers
    assert count("keep=qkv,attention,proj") == none + layers
    assert count("keep=mlp-up,attention") == none + 2 * layers
    assert count("keep=proj") == none + 3 * layers
    assert count("keep=mlp-up,proj,attention,qkv") == none
    assert none < count("every=2") == (none + count("full")) / 2


@pytest.mark.parametrize("rank", [4, 64])  # 64: an adapter's matrices have the projection's shape
@pytest.mark.parametrize("kind", get_args(Quantization))
def test_products_of_adapters_are_told_from_those_of_projections(
    kind: Quantization, rank: int
) -> None:
    def count(mode: str, *targets: LoraTarget) -> int:
        lora = Lora(rank=rank, alpha=8.0, targets=targets)
        config = replace(CONFIG, d_model=64, activation_checkpointing=mode, loss_chunk=24)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        with CountMatmuls() as matmuls:
            GPT(replace(config, lora=lora, quantize_base=kind))(tokens, tokens).backward()
        total: int = matmuls.count
        return total

    def again(mode: str, *targets: LoraTarget) -> float:
        return (count(mode, *targets) - count("none", *targets)) / CONFIG.layers

    # An adapter's second product is never kept, its first with its target's; backward asks for
    # neither where all are.
    assert again("selective", "qkv") == 0
    assert again("keep=proj,mlp-up", "qkv") == 3 + 1
    # Quantised weights save their bytes behind their product, also the MLP's second.
    assert again("keep=qkv", "proj") == 1 + 3 + 1 + (kind != "none")
    # Behind the MLP's second projection is an adapter, up to which all is passed once more.
    assert again("selective", "qkv", "proj", "mlp") == 0
    assert again("keep=qkv,attention,proj", "qkv", "proj", "mlp") == 2 + 3 + 2
    assert again("keep=mlp-up", "mlp") == 3 + 1


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("keep=qkv", (96, 0)), ("keep=mlp-up", (0, 128)), ("selective", (96, 128)), ("full", (0, 0))],
)
def test_compiled_blocks_keep_what_is_named(mode: str, kept: tuple[int, int]) -> None:
    """The widths of what is as long as a micro-batch and as wide as qkv or mlp-up."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    model = GPT(replace(CONFIG, activation_checkpointing=mode, loss_chunk=24, layers=2))
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    shapes = [tuple(tensor.shape) for tensor in saved]
    assert [width * shapes.count((64, width)) for width in (96, 128)] == [2 * w for w in kept]


def test_evaluation_does_not_checkpoint() -> None:
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    model = GPT(replace(CONFIG, activation_checkpointing="full"))
    model.eval()
    with CountMatmuls() as evaluation:
        model(tokens, tokens).backward()
    model.train()
    with CountMatmuls() as training:
        model(tokens, tokens).backward()
    assert evaluation.count < training.count


ROPE = ModelConfig(
    vocab_size=16,
    context=128,
    layers=2,
    d_model=8,
    heads=2,
    kv_heads=1,
    d_ff=16,
    position="rope",
    norm="rms",
    activation="swiglu",
)


def _saved(config: ModelConfig) -> list[Tensor]:
    """Return what one sequence's forward saves for backward, views and all."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    tokens = torch.zeros(1, config.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        GPT(config)(tokens, tokens)
    return saved


class LargestStorage(TorchDispatchMode):
    """Elements of the largest storage that an operation returns, in bytes / 4."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("layers", [1, 4])
def test_there_is_one_rotation_for_all_layers(layers: int) -> None:
    saved = _saved(replace(ROPE, layers=layers))
    tables = [tensor for tensor in saved if tensor.shape == (128, 1, 2)]
    assert all(tensor.dtype == torch.float32 for tensor in tables)
    assert len({tensor.untyped_storage()._cdata for tensor in tables}) == 2  # cosines and sines
    assert len(tables) >= 4 * layers


def test_nothing_is_as_large_as_all_pairs_of_positions() -> None:
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    largest = {}
    kinds: tuple[AttentionKind, ...] = ("sdpa", "eager")
    for kind in kinds:
        model = GPT(replace(ROPE, attention=kind))
        with LargestStorage() as storage:
            model(tokens, tokens).backward()
        largest[kind] = storage.elements
    assert largest["sdpa"] == 128 * 2 * 16 < 128 * 128 <= largest["eager"]


def test_shared_key_heads_are_saved_once() -> None:
    """Queries and outputs have 2 heads of 4; keys and values 1."""
    shapes = [tuple(tensor.shape) for tensor in _saved(replace(ROPE, attention="sdpa"))]
    assert shapes.count((1, 2, 128, 4)) == shapes.count((1, 1, 128, 4)) == 2 * ROPE.layers
