"""Which weights are pruned, against plain loops; their bits; smaller models of heads and units."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.config.schema import DataChoice
from launcher.data import GlobalBatches
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, initial_value
from launcher.strategies.masks import CHUNK_ELEMENTS, bytes_of, pack, zero
from launcher.tools.prune.choice import PruneOptions
from launcher.tools.prune.kinds import REST, kinds_of
from launcher.tools.prune.text import Text
from launcher.tools.prune.weights import importance, kept, narrower, prune_groups, prune_in_place
from launcher.util.errors import UserError

GPT2 = ModelConfig(vocab_size=257, context=24, layers=2, heads=4, d_model=32)
_ROPE: dict[str, Any] = {
    **{"kv_heads": 2, "position": "rope", "norm": "rms", "activation": "swiglu", "d_ff": 40},
    **{"bias": "none", "tied": False, "qk_norm": True},
}
LLAMA = dataclasses.replace(GPT2, **_ROPE)


def options(**changes: Any) -> PruneOptions:
    return PruneOptions(run=Path("run"), out=Path("out"), **changes)


def built(config: ModelConfig) -> GPT:
    """Every parameter random, biases too."""
    model = GPT(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, config, seed=3, device="cpu")
        parameter.copy_(value + 0.05 * torch.randn(value.shape, generator=seeded(len(name))))
    return model


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("start", [0, 3, 8, 13])
def test_bits_of_any_range(numel: int, start: int) -> None:
    whole = torch.rand(start + numel, generator=seeded(numel)) < 0.5
    bits = pack(whole)
    assert bits.tolist() == [
        sum(bit << place for place, bit in enumerate(whole[first : first + 8].int().tolist()))
        for first in range(0, len(whole), 8)
    ]
    own = bits[start // 8 :]
    assert len(own) == bytes_of(start, numel)
    values = torch.full((numel,), math.nan)
    values[whole[start:]] = 5.0
    zero(values, own, skip=start % 8)
    assert values.tolist() == [5.0 if stays else 0.0 for stays in whole[start:].tolist()]


def test_bits_are_unpacked_a_piece_at_a_time() -> None:
    count = 2 * CHUNK_ELEMENTS + 11
    whole = torch.rand(count, generator=seeded(0)) < 0.5
    values = torch.ones(count - 5)
    zero(values, pack(whole), skip=5)
    assert torch.equal(values, whole[5:].float())


def test_nothing_is_held_of_no_elements() -> None:
    assert bytes_of(5, 0) == 0


def removed_by_loop(scores: Tensor, count: int) -> set[int]:
    order = sorted(range(scores.numel()), key=lambda n: float(scores.flatten()[n]))
    return set(order[:count])


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.75])
def test_the_smallest_magnitudes_of_a_matrix_go(sparsity: float) -> None:
    weight = torch.randn(12, 20, generator=seeded(1))
    mask = kept(importance(weight, None), options(sparsity=sparsity))
    gone = {n for n, stays in enumerate(mask.flatten().tolist()) if not stays}
    assert gone == removed_by_loop(weight.abs(), round(240 * sparsity))


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.75])
def test_wanda_compares_within_a_row(sparsity: float) -> None:
    weight, norms = torch.randn(12, 20, generator=seeded(1)), torch.rand(20, generator=seeded(2))
    mask = kept(importance(weight, norms), options(sparsity=sparsity, method="wanda"))
    for row, stays in zip(weight.tolist(), mask.tolist(), strict=True):
        scores = torch.tensor([abs(w) * float(n) for w, n in zip(row, norms, strict=True)])
        gone = {n for n, stay in enumerate(stays) if not stay}
        assert gone == removed_by_loop(scores, round(20 * sparsity))


@pytest.mark.parametrize("norms", [None, torch.rand(20, generator=seeded(2))])
def test_two_of_each_four_along_the_input(norms: Tensor | None) -> None:
    weight = torch.randn(12, 20, generator=seeded(1))
    scores = importance(weight, norms)
    mask = kept(scores, options(pattern="2:4"))
    for row, stays in zip(scores.tolist(), mask.tolist(), strict=True):
        for first in range(0, 20, 4):
            group = row[first : first + 4]
            best = sorted(range(4), key=lambda n: group[n])[2:]
            assert [n for n in range(4) if stays[first + n]] == sorted(best)


def test_equal_weights_go_in_the_right_number() -> None:
    mask = kept(torch.zeros(6, 8), options(sparsity=0.25))
    assert int((~mask).sum()) == 12


def test_only_projections_are_pruned() -> None:
    model, before = built(LLAMA), dict(built(LLAMA).named_parameters())
    masks = prune_in_place(model, None, options())
    assert len(masks) == 4 * LLAMA.layers
    for name, parameter in model.named_parameters():
        if name in masks:
            assert torch.equal(parameter, before[name] * masks[name])
            assert int((parameter == 0).sum()) == parameter.numel() // 2
        else:
            assert torch.equal(parameter, before[name])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("text")
    path = folder / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} says {n * n} times little." for n in range(300)))
    patch = pytest.MonkeyPatch()
    patch.setenv("SHARDSCALE_CACHE", str(folder / "cache"))
    found = Text.open(DataChoice(data=str(path), seq_len=24), "byte", GPT2)
    patch.undo()
    return found


def test_calibration_reads_the_training_split_once_at_most(text: Text) -> None:
    batches = GlobalBatches(text.corpus.train, seq_len=24, global_batch=8, seed=0)
    everything = batches.steps_per_epoch * 8 * 24
    assert text.calibration_tokens(10**12) == everything <= len(text.corpus.train.tokens)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_norms_are_those_of_what_projections_are_given(config: ModelConfig, text: Text) -> None:
    model = built(config)
    norms = text.input_norms(model, 400)
    assert text.calibration_tokens(400) == 3 * 8 * 24
    batches = GlobalBatches(text.corpus.train, seq_len=24, global_batch=8, seed=0)
    rows = [batches.rank_slice(step, rank=0, world_size=1).tokens[:, :-1] for step in range(3)]
    tokens = torch.cat([torch.from_numpy(row) for row in rows])  # [24, 24]
    block: Any = model.blocks[0]
    x = model.embed(tokens, torch.arange(24))
    first = block.ln_1(x).flatten(0, 1)
    assert torch.allclose(norms["blocks.0.attn.qkv.weight"], first.norm(dim=0), rtol=1e-4)
    # Behind attention there is the residual stream; the MLP's inputs follow from it.
    streams: list[Tensor] = []
    hook = block.ln_2.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    model(tokens)
    hook.remove()
    inner = block.ln_2(streams[0]).flatten(0, 1)
    assert torch.allclose(norms["blocks.0.mlp.fc.weight"], inner.norm(dim=0), rtol=1e-4)
    hidden = block.mlp.activation(block.mlp.fc(inner))
    assert torch.allclose(norms["blocks.0.mlp.out.weight"], hidden.norm(dim=0), rtol=1e-4)
    # What attention gives is what its projection turned into the difference of both streams.
    found = norms["blocks.0.attn.proj.weight"]
    assert found.shape == (config.attention_dim,)
    attended = block.attn.proj.weight.pinverse() @ (streams[0] - x).flatten(0, 1).T
    if config is LLAMA:  # which adds no bias
        assert torch.allclose(found, attended.T.norm(dim=0), rtol=1e-3)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("pattern", ["heads", "mlp"])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_narrower_model_is_the_old_one_without_what_went(
    config: ModelConfig, pattern: str, method: str, text: Text
) -> None:
    model, chosen = built(config), options(pattern=pattern, method=method)
    norms = text.input_norms(model, 100) if method == "wanda" else None
    smaller = prune_groups(model, norms, chosen)
    assert smaller.config == narrower(config, chosen)
    counted = sum(p.numel() for p in smaller.parameters())
    assert counted == smaller.config.parameter_count
    if pattern == "heads":
        heads, groups = config.heads // 2, config.kv_head_count // 2
        assert (smaller.config.heads, smaller.config.kv_head_count) == (heads, groups)
        assert smaller.config.head_size == config.head_size
        per_layer = (heads + 2 * groups) * 8 * (32 + (1 if config.has_bias("qkv") else 0))
        per_layer += heads * 8 * 32
    else:
        assert smaller.config.ffn_dim == config.ffn_dim // 2
        per_layer = config.ffn_dim // 2 * 32 * (1 + len(config.up_sizes))
        per_layer += config.ffn_dim // 2 if config.has_bias("mlp") else 0
    assert counted == config.parameter_count - config.layers * per_layer

    # A group that nobody reads is not there. What the old model keeps is found by its values.
    reads = "attn.proj.weight" if pattern == "heads" else "mlp.out.weight"
    for layer in range(config.layers):
        whole = model.get_parameter(f"blocks.{layer}.{reads}")
        stays = smaller.get_parameter(f"blocks.{layer}.{reads}")
        left = [bool((stays == column[:, None]).all(dim=0).any()) for column in whole.T]
        assert sum(left) == stays.size(1)
        whole.mul_(torch.tensor(left))
    tokens = torch.randint(0, 257, (2, 24), generator=seeded(5))
    assert torch.allclose(smaller(tokens), model(tokens), atol=1e-4)


def test_the_least_important_head_goes() -> None:
    config = dataclasses.replace(LLAMA, layers=1)
    model = built(config)
    first_head = slice(0, 16)  # of two key/value heads, each with two queries of 8
    model.get_parameter("blocks.0.attn.proj.weight")[:, first_head] *= 100
    wanted = model.get_parameter("blocks.0.attn.proj.weight")[:, first_head].clone()
    smaller = prune_groups(model, None, options(pattern="heads"))
    assert torch.equal(smaller.get_parameter("blocks.0.attn.proj.weight"), wanted)


def test_bytes_follow_from_the_zeros() -> None:
    model = built(GPT2)
    prune_in_place(model, None, options(sparsity=0.25))
    found = kinds_of(GPT2, dict(model.named_parameters()), masked=True)
    qkv, rest = found[0], found[-1]
    assert (qkv.before, qkv.after, qkv.zeros) == (2 * 96 * 32, 2 * 96 * 32, 96 * 32 // 2)
    assert qkv.sparsity == 0.25
    assert qkv.dense_bytes(2) == 2 * 6144
    assert qkv.sparse_bytes(2) == 2 * 4608 + 6144 // 8
    assert rest.name == REST
    assert rest.sparse_bytes(4) == rest.dense_bytes(4)
    assert sum(kind.after for kind in found) == GPT2.parameter_count


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_a_sparsity_that_is_none(sparsity: float) -> None:
    with pytest.raises(UserError, match="must be above 0 and below 1"):
        options(sparsity=sparsity)
