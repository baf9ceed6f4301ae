"""GPT-2 as transformers writes it, config.json and tensor names, from our model and to it."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.errors import UserError
from launcher.model.config import Activation, ModelConfig
from launcher.model.gpt import GPT

PREFIX = "transformer."
"""What GPT2LMHeadModel puts before the names of its decoder, and GPT2Model does not."""
HEAD = "lm_head.weight"
EMBEDDING = f"{PREFIX}wte.weight"

_LAYER_NORM_EPS = 1e-5  # torch's default, which our model keeps
_NAMES = {
    "blocks.": "h.",
    "attn.qkv.": "attn.c_attn.",
    "attn.proj.": "attn.c_proj.",
    "mlp.fc.": "mlp.c_fc.",
    "mlp.out.": "mlp.c_proj.",
}
# Three ways to compute one tanh approximation; they differ by rounding.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
# What a config.json that leaves a key out means by it (transformers' GPT2Config).
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    **dict.fromkeys(_DROPOUTS, 0.1),
}
_ONLY: dict[str, Any] = {
    "layer_norm_epsilon": _LAYER_NORM_EPS,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
"""Options that change what is computed, with the one value that our model computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counterpart:
    """A tensor of transformers' GPT-2 and the parameter of ours that holds the same values."""

    theirs: str
    ours: str
    shape: tuple[int, ...]
    """Of ours."""
    transposed: bool
    """Our linears are [out, in]; theirs are [in, out]."""
    absent: bool
    """A bias that our model was built without. Theirs has it always, and 0 changes nothing."""

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the same values on their side."""
        return self.shape[::-1] if self.transposed else self.shape

    def turned(self, tensor: Tensor) -> Tensor:
        """A view of either side's tensor as the other side's."""
        return tensor.t() if self.transposed else tensor


def counterparts(config: ModelConfig) -> list[Counterpart]:
    """All tensors of transformers' GPT-2 of this shape, in the order of our parameters."""
    ours = parameter_shapes(config)
    every = parameter_shapes(dataclasses.replace(config, attention_bias=True, mlp_bias=True))
    return [
        Counterpart(
            theirs=_their_name(name),
            ours=name,
            shape=shape,
            transposed=bool(re.search(r"\.(attn|mlp)\.\w+\.weight", name)),
            absent=name not in ours,
        )
        for name, shape in every.items()
    ]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameters and their shapes; a tied head is the token embedding."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}


def to_config_json(
    config: ModelConfig, *, end_of_text: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """The config.json with which transformers' GPT2LMHeadModel computes what our model does.

    Raises:
        UserError: GPT-2's architecture has no such model.
    """
    if config.window is not None and config.window < config.context - 1:
        raise UserError(
            f"window {config.window}: transformers' GPT-2 has no sliding window, so this model "
            "would compute something else there; use --format safetensors"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_ctx": config.context,  # other programs that read these folders ask for this one
        "n_embd": config.d_model,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.d_ff,
        "activation_function": "gelu_new" if config.activation == "gelu" else config.activation,
        "layer_norm_epsilon": _LAYER_NORM_EPS,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        # Spelled out also when there is none: left out they would be GPT-2's own 50256.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def from_config_json(document: Mapping[str, Any], path: Path) -> ModelConfig:
    """Our model of the shape that a config.json describes; `path` is for the messages.

    Its parameters have all biases, as GPT-2's always do.

    Raises:
        UserError: it describes something that our model does not compute.
    """
    model_type = document.get("model_type")
    if model_type != "gpt2":
        raise UserError(f"{path}: model_type is {model_type!r}, and only 'gpt2' can be imported")
    for key, wanted in _ONLY.items():
        value = document.get(key, wanted)
        if value != wanted:
            raise UserError(
                f"{path}: {key} is {value!r}, and shardscale's model computes only {wanted!r}: "
                "it cannot be imported"
            )
    activation = document.get("activation_function", _DEFAULTS["activation_function"])
    if activation not in tuple(_ACTIVATIONS):
        raise UserError(
            f"{path}: activation_function is {activation!r}, and shardscale's model has only "
            f"{', '.join(_ACTIVATIONS)}: it cannot be imported"
        )
    inner = document.get("n_inner")
    try:
        return ModelConfig(
            vocab_size=_number(document, "vocab_size", path, int),
            context=_number(document, "n_positions", path, int),
            layers=_number(document, "n_layer", path, int),
            heads=_number(document, "n_head", path, int),
            d_model=_number(document, "n_embd", path, int),
            d_ff=None if inner is None else _number(document, "n_inner", path, int),
            activation=_ACTIVATIONS[activation],
            tied=bool(document.get("tie_word_embeddings", _DEFAULTS["tie_word_embeddings"])),
            dropout=_dropout(document, path),
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _dropout(document: Mapping[str, Any], path: Path) -> float:
    values: dict[str, float] = {k: _number(document, k, path, float) for k in _DROPOUTS}
    if not all(math.isclose(value, values["resid_pdrop"]) for value in values.values()):
        shown = ", ".join(f"{key} {value:g}" for key, value in values.items())
        raise UserError(
            f"{path}: {shown} differ, and shardscale's model has one dropout: make them equal there"
        )
    return values["resid_pdrop"]


def _number(document: Mapping[str, Any], key: str, path: Path, kind: type[Any]) -> Any:
    value = document.get(key, _DEFAULTS.get(key))
    accepted = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted):
        words = "a whole number" if kind is int else "a number"
        raise UserError(f"{path}: {key} is {value!r}, but must be {words}")
    return kind(value)


def _their_name(name: str) -> str:
    if name == "head.weight":
        return HEAD
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return PREFIX + name
