"""Named sizes: the decoders that people know, by what they are called."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from launcher.model.config import ModelConfig
from launcher.model.foreign.shapes import known_shapes


def _gpt2(layers: int, heads: int, d_model: int) -> ModelConfig:
    return ModelConfig(vocab_size=50257, context=1024, layers=layers, heads=heads, d_model=d_model)


def _gpt3(layers: int, heads: int, d_model: int) -> ModelConfig:
    return replace(_gpt2(layers, heads, d_model), context=2048)


def _llama(
    layers: int, heads: int, kv_heads: int, d_model: int, d_ff: int, **options: Any
) -> ModelConfig:
    """Rotary positions, RMSNorm, SwiGLU, no biases; Llama 2's vocabulary, context and eps."""
    return ModelConfig(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        d_model=d_model,
        d_ff=d_ff,
        position="rope",
        norm="rms",
        activation="swiglu",
        attention_bias=False,
        mlp_bias=False,
        **{"vocab_size": 32_000, "context": 4096, "tied": False, **options},
    )


def _llama3(*shape: int, rope_factor: float | None = None, **options: Any) -> ModelConfig:
    """Llama 3, or with a factor for longer contexts 3.1 and 3.2."""
    if rope_factor is not None:
        options["rope_scaling"] = (rope_factor, 1.0, 4.0, 8192.0)
    context = 8192 if rope_factor is None else 131_072
    return _llama(*shape, vocab_size=128_256, context=context, rope_theta=500_000.0, **options)


def _smollm2(*shape: int, rope_theta: float = 100_000.0) -> ModelConfig:
    return _llama(*shape, vocab_size=49_152, context=8192, rope_theta=rope_theta, tied=True)


def _qwen2(*shape: int, **options: Any) -> ModelConfig:
    rope = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "context": 131_072}
    return _llama(*shape, qkv_bias=True, **{**rope, "vocab_size": 151_936, **options})


def _qwen3(*shape: int, tied: bool = True) -> ModelConfig:
    rope: dict[str, Any] = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6, "context": 40_960}
    return _llama(*shape, vocab_size=151_936, head_dim=128, qk_norm=True, tied=tied, **rope)


# GPT-2 sizes as released; 2.7b to 13b and 175b from table 2.1 of the GPT-3 paper
# (arXiv:2005.14165), 13b with d_model 5120, which its 40 heads divide, where the paper prints 5140;
# 30b and 66b, which it does not have, with layers, heads and width of OPT's (arXiv:2205.01068). The
# others as in the config.json of their first base release: layers, heads, kv_heads, d_model, d_ff.
NAMED: dict[str, ModelConfig] = {
    "nano": ModelConfig(vocab_size=4096, context=128, layers=4, heads=4, d_model=192),
    "seed-134m": ModelConfig(
        vocab_size=32_000,
        context=256,
        layers=12,
        heads=12,
        d_model=768,
        attention_bias=False,
        tied=False,
    ),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "2.7b": _gpt3(32, 32, 2560),
    "6.7b": _gpt3(32, 32, 4096),
    "13b": _gpt3(40, 40, 5120),
    "30b": _gpt3(48, 56, 7168),
    "66b": _gpt3(64, 72, 9216),
    "175b": _gpt3(96, 96, 12_288),
    "tinyllama-1.1b": _llama(22, 32, 4, 2048, 5632, context=2048),
    "smollm2-135m": _smollm2(30, 9, 3, 576, 1536),
    "smollm2-360m": _smollm2(32, 15, 5, 960, 2560),
    "smollm2-1.7b": _smollm2(24, 32, 32, 2048, 8192, rope_theta=130_000.0),
    "llama-3.2-1b": _llama3(16, 32, 8, 2048, 8192, rope_factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 24, 8, 3072, 8192, rope_factor=32.0, tied=True),
    "llama-3-8b": _llama3(32, 32, 8, 4096, 14_336),
    "llama-3-70b": _llama3(80, 64, 8, 8192, 28_672),
    "llama-3.1-8b": _llama3(32, 32, 8, 4096, 14_336, rope_factor=8.0),
    "llama-3.1-70b": _llama3(80, 64, 8, 8192, 28_672, rope_factor=8.0),
    "llama-3.1-405b": _llama3(126, 128, 8, 16_384, 53_248, rope_factor=8.0),
    "llama-2-7b": _llama(32, 32, 32, 4096, 11_008),
    "llama-2-13b": _llama(40, 40, 40, 5120, 13_824),
    "llama-2-70b": _llama(80, 64, 8, 8192, 28_672),
    "qwen2.5-0.5b": _qwen2(24, 14, 2, 896, 4864, context=32_768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 12, 2, 1536, 8960, tied=True),
    "qwen2.5-3b": _qwen2(36, 16, 2, 2048, 11_008, context=32_768, tied=True),
    "qwen2.5-7b": _qwen2(28, 28, 4, 3584, 18_944, vocab_size=152_064),
    "qwen2.5-14b": _qwen2(48, 40, 8, 5120, 13_824, vocab_size=152_064, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(64, 40, 8, 5120, 27_648, vocab_size=152_064, norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(80, 64, 8, 8192, 29_568, vocab_size=152_064, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 16, 8, 1024, 3072),
    "qwen3-1.7b": _qwen3(28, 16, 8, 2048, 6144),
    "qwen3-4b": _qwen3(36, 32, 8, 2560, 9728),
    "qwen3-8b": _qwen3(36, 32, 8, 4096, 12_288, tied=False),
    "qwen3-14b": _qwen3(40, 40, 8, 5120, 17_408, tied=False),
    "qwen3-32b": _qwen3(64, 64, 8, 5120, 25_600, tied=False),
    # Its window of 4096 tokens counts the token itself.
    "mistral-7b": _llama(32, 32, 8, 4096, 14_336, context=32_768, window=4095),
    "mistral-7b-v0.3": _llama(
        32, 32, 8, 4096, 14_336, vocab_size=32_768, context=32_768, rope_theta=1_000_000.0
    ),
}
_ALIASES: Final = {
    "gpt2-small": "gpt2",
    "gpt3": "175b",
    "gpt3-2.7b": "2.7b",
    "gpt3-6.7b": "6.7b",
    "gpt3-13b": "13b",
    "gpt3-175b": "175b",
    "mistral-7b-v0.1": "mistral-7b",
    "tinyllama": "tinyllama-1.1b",
    "tinyllama-1.1b-v1.0": "tinyllama-1.1b",
    "llama-3.3-70b": "llama-3.1-70b",
}
"""Other names of a size, beside those that `_words` makes equal."""
_SAME_SHAPE: Final = frozenset(
    {"meta", "instruct", "chat", "base", "it", "pt", "hf", "bnb", "4bit", "bf16"}
)
"""Words of a hub name that do not change the shape."""
_NEAREST: Final = 3


CUSTOM = "custom"
"""Name of a model all of whose dimensions are given."""
_DIMENSIONS = ("vocab_size", "context", "layers", "heads", "d_model")


def known_name(text: str) -> str | None:
    """Return the named size that `text` means, or None: any capitals, with or without dashes, with
    an organisation of the hub (`Qwen/Qwen3-8B`, `meta-llama/Meta-Llama-3.1-8B-Instruct`)."""
    if text in NAMED or text == CUSTOM:
        return text
    return _by_words().get(_words(text))


def nearest_names(text: str) -> str:
    """Return the named sizes whose names are most like `text`, the most similar first."""
    known = _by_words()
    close = difflib.get_close_matches(_words(text), known, n=2 * _NEAREST, cutoff=0.0)
    *others, last = list(dict.fromkeys(known[words] for words in close))[:_NEAREST]
    return f"{', '.join(others)} and {last}"


def _words(text: str) -> str:
    """Return the part of a name that identifies a shape: `org/Llama-3.1-8B-Instruct` and `llama3.1
    8b` are `llama3.18b`."""
    words = re.split(r"[-_\s]+", text.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _SAME_SHAPE)


@cache
def _by_words() -> Mapping[str, str]:
    found = {_words(name): name for name in NAMED}
    found.update({_words(alias): name for alias, name in _ALIASES.items()})
    for shape in known_shapes().values():
        found.update({_words(text): shape.name for text in (shape.name, shape.hub, *shape.also)})
    return found


def named(name: str, **overrides: Any) -> ModelConfig:
    """Return a named size with some fields replaced; `custom` takes all from the arguments.

    Raises ValueError for an unknown name, with the nearest ones, or for an impossible shape.
    """
    if name == CUSTOM:
        if missing := [field for field in _DIMENSIONS if field not in overrides]:
            raise ValueError(f"model {CUSTOM} has no sizes of its own; give {', '.join(missing)}.")
        return ModelConfig(**overrides)
    known = known_name(name)
    if known is None:
        raise ValueError(
            f"model {name!r:.80} is unknown: the nearest names are {nearest_names(name)}; for any "
            "other give its config, as hf:ORG/NAME, a folder or a config.json."
        )
    if known not in NAMED:
        raise ValueError(f"model {known} is a config of transformers, which is not taken here.")
    return replace(NAMED[known], **overrides)
