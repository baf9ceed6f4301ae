"""Decoding with a cache: the tokens that transformers gives, and the logits of the whole sequence
at once; what is drawn, against the formula."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.config.families.base import spelled_out
from launcher.model.config import ModelConfig
from launcher.model.decode import Cache, continuation
from launcher.model.gpt import GPT
from launcher.run.sampling import Sampling, probabilities, token_sampler
from launcher.util.errors import UserError

VOCABULARY, CONTEXT, PROMPT, MOST = 97, 160, 17, 100
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "context": CONTEXT, "layers": 2}
LLAMA: dict[str, Any] = {
    **{"heads": 6, "kv_heads": 2, "d_model": 48, "d_ff": 40},
    **{"position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "tied": False},
}
FAMILIES: dict[str, ModelConfig] = {
    name: ModelConfig(**SHAPE, **options)
    for name, options in {
        "gpt2": {"heads": 4, "d_model": 32},
        "llama": {**LLAMA, "rope_scaling": (8.0, 1.0, 4.0, 32.0), "rope_theta": 500.0},
        "mistral": {**LLAMA, "window": 7},
        "qwen2": {**LLAMA, "bias": "qkv", "tied": True, "rope_theta": 1e6},
        "qwen3": {**LLAMA, "head_dim": 10, "qk_norm": True, "norm_eps": 1e-6},
    }.items()
}


def theirs_of(family: str) -> Any:
    """transformers' model of the same shape, with weights that make up its mind."""
    transformers = pytest.importorskip("transformers")
    config = FAMILIES[family]
    torch.manual_seed(3)
    if family == "gpt2":
        sizes = {"n_embd": config.d_model, "n_layer": config.layers, "n_head": config.heads}
        settings = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,  # 50256 by default, which this vocabulary does not have
            **sizes,
        )
        return transformers.GPT2LMHeadModel(settings).eval()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor")
        rope |= dict(zip(names, config.rope_scaling[:3], strict=True))
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": 32}
    options: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT},
        **{"hidden_size": config.d_model, "intermediate_size": config.ffn_dim},
        **{"num_hidden_layers": config.layers, "num_attention_heads": config.heads},
        **{"num_key_value_heads": config.kv_heads, "head_dim": config.head_size},
        **{"rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied},
        **{"rope_parameters": rope, "initializer_range": 0.3},
    }
    if family == "mistral":
        assert config.window is not None
        options["sliding_window"] = config.window + 1  # it counts the token itself
    name = family.capitalize()
    settings = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}ForCausalLM")(settings).eval()


def ours_of(theirs: Any, folder: Path) -> GPT:
    """Our model with the same weights, as the verb loads it."""
    theirs.save_pretrained(folder)
    with open_source(folder) as source:
        return build(source, device=torch.device("cpu"), dtype=torch.float32)


def prompt() -> Tensor:
    return torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(1))


def greedy(logits: Tensor) -> int:
    return int(logits.argmax())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = theirs_of(family)
    expected = theirs.generate(
        prompt()[None],
        attention_mask=torch.ones(1, PROMPT, dtype=torch.int64),
        max_new_tokens=MOST,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )[0, PROMPT:].tolist()
    assert len(expected) == MOST
    assert len(set(expected)) > 10  # no model that repeats itself whatever it is asked
    model = ours_of(theirs, tmp_path)
    assert spelled_out(replace(model.config, dropout=0.0)) == spelled_out(FAMILIES[family])
    assert list(continuation(model, prompt().tolist(), greedy, most=MOST)) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_gives_the_logits_of_the_whole_sequence(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = GPT(FAMILIES[family]).to(dtype).eval()
    tokens = torch.randint(VOCABULARY, (CONTEXT,))
    with torch.inference_mode():
        whole = model(tokens[None])[0]
        for first in (1, PROMPT):
            cache = Cache(model, CONTEXT)
            found = [cache.extend(tokens[:first])]
            found += [cache.extend(tokens[n : n + 1]) for n in range(first, CONTEXT)]
            apart = (torch.stack(found) - whole[first - 1 :]).abs().max()
            assert apart <= 8 * torch.finfo(dtype).eps * whole.abs().max()


def test_a_window_forgets_what_lies_before_it() -> None:
    """Else the test above would pass with a cache that has no window."""
    torch.manual_seed(0)
    model = GPT(FAMILIES["mistral"]).eval()
    wide = GPT(replace(FAMILIES["mistral"], window=None)).eval()
    wide.load_state_dict(model.state_dict())
    tokens = torch.randint(VOCABULARY, (CONTEXT,))
    with torch.inference_mode():
        apart = (model(tokens[None]) - wide(tokens[None])).abs().amax(-1)[0]
    assert apart[:8].max() < 1e-5
    assert apart[8:].min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_of_a_window_is_of_the_queries_type(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's memory-efficient kernel takes no other; the CPU's does."""
    model = GPT(FAMILIES["mistral"]).to(dtype).eval()
    masks: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*inputs: Any, **options: Any) -> Tensor:
        masks.append(options.get("attn_mask"))
        return attend(*inputs, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    with torch.inference_mode():
        Cache(model, PROMPT).extend(torch.arange(PROMPT))
    assert [mask.dtype for mask in masks] == [dtype] * model.config.layers


def test_a_kernel_may_lay_its_output_out_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of CUDA in fp32 has the heads of a token side by side, the CPU's of all tokens."""
    torch.manual_seed(0)
    model, tokens = GPT(FAMILIES["llama"]).eval(), torch.randint(VOCABULARY, (PROMPT,))
    attend = torch.nn.functional.scaled_dot_product_attention

    def tokens_first(*inputs: Any, **options: Any) -> Tensor:
        return attend(*inputs, **options).transpose(1, 2).contiguous().transpose(1, 2)

    def found() -> Tensor:
        cache = Cache(model, PROMPT)
        cache.extend(tokens[:-1])
        return cache.extend(tokens[-1:])

    with torch.inference_mode():
        expected = found()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", tokens_first)
        assert torch.equal(found(), expected)


def test_grouped_heads_are_kept_once() -> None:
    with torch.inference_mode():
        cache = Cache(GPT(FAMILIES["llama"]), 50)
    keys, values = cache._of_blocks[0]
    assert keys.shape == values.shape == (1, 2, 50, 8)


LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.5, 3.0, -2.0])


def reference(keep: Callable[[list[int]], list[int]], temperature: float) -> Tensor:
    """Softmax over the kept ones of the tokens in falling order, written out."""
    order = sorted(range(len(LOGITS)), key=lambda token: -float(LOGITS[token]))
    kept = keep(order)
    weights = [float((LOGITS[n] / temperature).exp()) if n in kept else 0.0 for n in range(6)]
    return torch.tensor(weights) / sum(weights)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_and_top_k_are_their_formulas(temperature: float) -> None:
    found = probabilities(LOGITS, Sampling(temperature=temperature))
    torch.testing.assert_close(found, reference(lambda order: order, temperature))
    found = probabilities(LOGITS, Sampling(temperature=temperature, top_k=2))
    torch.testing.assert_close(found, reference(lambda order: order[:2], temperature))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.97, 1.0])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float) -> None:
    chances = LOGITS.softmax(0)

    def fewest(order: list[int]) -> list[int]:
        count = 1
        while float(chances[order[:count]].sum()) < top_p and count < len(order):
            count += 1
        return order[:count]

    found = probabilities(LOGITS, Sampling(temperature=1.0, top_p=top_p))
    torch.testing.assert_close(found, reference(fewest, 1.0))


def test_a_tiny_temperature_is_greedy_and_no_nan() -> None:
    found = probabilities(LOGITS * 1e4, Sampling(temperature=1e-30))
    assert found.tolist() == [0, 0, 0, 0, 1, 0]


def test_what_is_drawn_has_the_distribution() -> None:
    sampler = token_sampler(Sampling(temperature=1.0, top_k=4), seed=5)
    drawn = torch.tensor([sampler(LOGITS) for _ in range(4_000)])
    expected = probabilities(LOGITS, Sampling(temperature=1.0, top_k=4))
    torch.testing.assert_close(drawn.bincount(minlength=6) / 4_000, expected, rtol=0, atol=0.03)


def test_a_seed_reproduces_and_another_does_not() -> None:
    model = GPT(FAMILIES["llama"]).eval()

    def drawn(seed: int) -> list[int]:
        sampler = token_sampler(Sampling(temperature=1.0), seed)
        return list(continuation(model, prompt().tolist(), sampler, most=30))

    before = torch.random.get_rng_state()
    assert drawn(1) == drawn(1) != drawn(2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "--temperature -0.5 must be 0 or more"),
        ({"temperature": float("nan")}, "--temperature nan must be 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0.0 must be more than 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "--top-p 1.5 must be more than 0 and at most 1"),
        ({"temperature": 1.0, "top_k": 0}, "--top-k 0 must be 1 or more"),
        ({"top_k": 3}, "--top-k 3 needs a --temperature above 0"),
        ({"top_p": 0.9}, "--top-p 0.9 needs a --temperature above 0"),
    ],
)
def test_what_nothing_can_be_drawn_with_is_refused(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**values)
