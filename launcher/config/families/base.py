"""A family: an architecture of transformers, with its names for our options and parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.config.families.fields import ConfigJson, Field, only
from launcher.model.config import WHAT_IT_COMPUTES, ModelConfig
from launcher.model.config_checks import biased
from launcher.util.errors import WHY, UserError, refused

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"(?:blocks\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")
_LINEAR = re.compile(r"\.(attn|mlp)\.\w+\.weight$")

# Fields that any config.json may have and that change nothing of what a decoder computes.
_HARMLESS = {
    *("architectures", "model_type", "_name_or_path", "name_or_path", "_commit_hash"),
    *("transformers_version", "transformers.js_config", "tokenizer_class", "prefix"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "attn_implementation"),
    *("_attn_implementation", "_attn_implementation_autoset", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type"),
    *("finetuning_task", "task_specific_params", "output_attentions", "output_hidden_states"),
    *("return_dict", "is_decoder", "tie_encoder_decoder", "chunk_size_feed_forward"),
    *("gradient_checkpointing", "keys_to_ignore_at_inference", "unsloth_fixed"),
    # Of generation, which older versions wrote here.
    *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams"),
    *("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "suppress_tokens"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "begin_suppress_tokens"),
}
# Ids of tokens that begin, end and pad a text.
ENDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_IDS: Final = (
    *("sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
_MAY_BE_SEVERAL: Final = ("eos_token_id", "forced_eos_token_id")
_NO_PADDING: Final = -1
"""`pad_token_id` of the first Llamas."""
_ONLY = (
    only("is_encoder_decoder", False),
    only("add_cross_attention", False),
    only("pruned_heads", {}),
    only("is_causal", True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of theirs, and the rows of our parameter that hold the same values."""

    theirs: str
    ours: str
    shape: tuple[int, ...]
    """Shape of these rows."""
    start: int
    """Elements of our parameter before them."""
    transposed: bool

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of the same values on their side."""
        return self.shape[::-1] if self.transposed else self.shape

    def turned(self, tensor: Tensor) -> Tensor:
        """Return either side's tensor as a view with the other side's layout."""
        return tensor.t() if self.transposed else tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """An architecture whose computations our model covers."""

    model_type: str
    architecture: str
    fixed: Mapping[str, Any]
    """Options of ours that all its models have."""
    fields: tuple[Field, ...]
    """Fields of its config.json."""
    harmless: frozenset[str] = frozenset()
    """Further fields of its config.json that change nothing of what is computed."""
    tensors: Mapping[str, tuple[str, ...]]
    """A module of ours -> modules of theirs whose rows, one after another, are its; `{}` stands for
    the number of the block."""
    prefix: str
    """Before the names of its decoder, which the decoder saved alone does not have."""
    buffers: str = r"(?!)"  # matches nothing
    """Pattern of tensors that are saved with the weights and are none, prefix taken off."""
    transposed: bool = False
    """Its linears are [in, out]; ours are [out, in]."""

    def read(self, values: Mapping[str, Any], path: Path) -> ModelConfig:
        """Return our model for a config.json; `path` is for the messages.

        Raises:
            UserError: it describes something that our model does not compute.
        """
        document = ConfigJson(values, path)
        options = dict(self.fixed)
        for field in (*_ONLY, *self.fields):
            options |= field.read(document)
        for key, value in document.unread():
            if key not in _HARMLESS | self.harmless:
                raise UserError(
                    f"{path}: {key} is {value!r}, and shardscale's {self.model_type} has no such "
                    "field: it cannot be imported (take the field out if it changes nothing)"
                )
        with refused(ValueError, f"{path}: {WHY}"):
            config = ModelConfig(**options)
        check_token_ids(values, config.vocab_size, path)
        return config

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the config.json of the family's model nearest to ours."""
        written: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
        }
        for field in self.fields:
            written |= field.write(spelled_out(config))
        return written

    def nearest(self, config: ModelConfig) -> ModelConfig | None:
        """Return the family's model nearest to ours, spelled out, or None if it has none of this
        shape."""
        try:
            return spelled_out(self.read(self.write(config), Path("config.json")))
        except UserError:
            return None

    def parts(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Part]:
        """Return their tensors for a model, given our parameters' shapes, in our order."""
        found = []
        for name, shape in shapes.items():
            match = _NAME.fullmatch(name)
            assert match is not None
            theirs = self.tensors[match["module"]]
            start = 0
            for pattern, rows in zip(theirs, _rows(config, len(theirs), shape), strict=True):
                found.append(
                    Part(
                        theirs=f"{pattern.format(match['layer'])}.{match['kind']}",
                        ours=name,
                        shape=(rows, *shape[1:]),
                        start=start,
                        transposed=self.transposed and bool(_LINEAR.search(name)),
                    )
                )
                start += rows * (shape[1] if len(shape) > 1 else 1)
        return found


def _rows(config: ModelConfig, count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of each of `count` tensors that form one of ours: all, swiglu's two, or q, k,
    v."""
    kv_rows = config.kv_head_count * config.head_size
    return {
        1: shape[:1],
        2: (config.ffn_dim, config.ffn_dim),
        3: (config.attention_dim, kv_rows, kv_rows),
    }[count]


def spelled_out(config: ModelConfig) -> ModelConfig:
    """Return the same model with every default spelled out, and without options that have no
    effect."""
    window = config.window
    learned = config.position == "learned"
    return dataclasses.replace(
        config,
        kv_heads=config.kv_head_count,
        head_dim=config.head_size,
        d_ff=config.ffn_dim,
        rope_theta=10_000.0 if learned else config.rope_theta,
        window=None if window is None or window >= config.context - 1 else window,
    )


def differences(mine: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return the options in which two models, spelled out, compute differently. A bias that only
    theirs has is none: it is 0."""
    return [
        name
        for name in (*WHAT_IT_COMPUTES, "window")
        if getattr(mine, name) != getattr(theirs, name)
        and (name != "bias" or {*biased(mine.bias)} - {*biased(theirs.bias)})
    ]


def check_token_ids(document: Mapping[str, Any], vocab_size: int, path: Path) -> None:
    """Refuse token ids outside the vocabulary; null is allowed.

    Args:
        document: what config.json or generation_config.json holds.
        path: the file, for the messages.

    Raises:
        UserError: naming the first of them.
    """
    for name in (*ENDS, *_OTHER_IDS):
        value = document.get(name)
        if value is None or (name == "pad_token_id" and value == _NO_PADDING):
            continue
        several = isinstance(value, list) and name in _MAY_BE_SEVERAL
        for token in value if several else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise UserError(
                    f"{path}: {name} is {value!r}, but must be null or a token id from 0 to "
                    f"{vocab_size - 1}, the vocabulary's last: correct it"
                )
