"""Architectures of transformers as tables: fields of config.json and tensors, by our options.

Another family is another entry of `ARCHITECTURES`. Of two that compute the same model, export
writes the first.
"""

from typing import Final

from launcher.config.families.base import Family
from launcher.config.families.fields import (
    activation,
    biases,
    dropout,
    gated_window,
    only,
    value,
    window,
)
from launcher.config.families.rope import ROPE
from launcher.model.config import Activation
from launcher.model.lora_config import PROJECTIONS

# Three ways to compute one tanh approximation; they differ by rounding.
_GPT2_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={"position": "learned", "norm": "layer"},
    fields=(
        value("vocab_size", "vocab_size", int, 50257),
        # What other programs ask for; transformers itself goes by n_positions.
        value("n_ctx", "context", int, 1024),
        value("n_positions", "context", int, 1024),
        value("n_embd", "d_model", int, 768),
        value("n_layer", "layers", int, 12),
        value("n_head", "heads", int, 12),
        value("n_inner", "d_ff", int, optional=True),
        activation("activation_function", _GPT2_ACTIVATIONS),
        value("layer_norm_epsilon", "norm_eps", float, 1e-5),
        value("tie_word_embeddings", "tied", bool, True),
        dropout(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
    ),
    harmless=frozenset(
        {
            *("reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
            *("summary_proj_to_labels", "summary_first_dropout"),
        }
    ),
    tensors={
        "wte": ("transformer.wte",),
        "wpe": ("transformer.wpe",),
        "ln_1": ("transformer.h.{}.ln_1",),
        "attn.qkv": ("transformer.h.{}.attn.c_attn",),
        "attn.proj": ("transformer.h.{}.attn.c_proj",),
        "ln_2": ("transformer.h.{}.ln_2",),
        "mlp.fc": ("transformer.h.{}.mlp.c_fc",),
        "mlp.out": ("transformer.h.{}.mlp.c_proj",),
        "ln_f": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    prefix="transformer.",
    # The causal mask, which older versions of transformers have saved with the weights.
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    transposed=True,
)

_OPTIONS = {"position": "rope", "norm": "rms", "bias": "none"}
_SIZES = (
    value("vocab_size", "vocab_size", int),
    value("max_position_embeddings", "context", int),
    value("hidden_size", "d_model", int),
    value("intermediate_size", "d_ff", int),
    value("num_hidden_layers", "layers", int),
    value("num_attention_heads", "heads", int),
)
_HEAD_DIM = value("head_dim", "head_dim", int, optional=True)
_SWIGLU = activation("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
_RMS_EPS = value("rms_norm_eps", "norm_eps", float, 1e-6)
_UNTIED = value("tie_word_embeddings", "tied", bool, False)
_NO_DROPOUT = only("attention_dropout", 0.0)
_COMMON = (*_SIZES, _SWIGLU, _RMS_EPS, ROPE, _UNTIED, _NO_DROPOUT)
"""Fields that all of them have."""

_TENSORS = {
    "wte": ("model.embed_tokens",),
    "ln_1": ("model.layers.{}.input_layernorm",),
    "attn.qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "attn.proj": ("model.layers.{}.self_attn.o_proj",),
    "ln_2": ("model.layers.{}.post_attention_layernorm",),
    "mlp.fc": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "mlp.out": ("model.layers.{}.mlp.down_proj",),
    "ln_f": ("model.norm",),
    "head": ("lm_head",),
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed=_OPTIONS,
    fields=(
        *_COMMON,
        value("num_key_value_heads", "kv_heads", int, optional=True),
        _HEAD_DIM,
        biases(attention_bias=("qkv", "proj"), mlp_bias=("mlp",)),
        only("pretraining_tp", 1),
        only("rope_interleaved", False),
    ),
    harmless=frozenset({"is_llama_config"}),
    tensors=_TENSORS,
    prefix="model.",
    # Frequencies, which older versions of transformers have saved with the weights.
    buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)

# A Llama with a sliding window and without biases.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=_OPTIONS,
    fields=(
        *_COMMON,
        value("num_key_value_heads", "kv_heads", int, 8, optional=True),
        _HEAD_DIM,
        window(default=4096),
    ),
    tensors=_TENSORS,
    prefix="model.",
)

# Qwen 2 and 2.5: a Llama with biases on queries, keys and values.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={**_OPTIONS, "bias": "qkv"},
    fields=(
        *_COMMON,
        value("num_key_value_heads", "kv_heads", int, 32, optional=True),
        _HEAD_DIM,
        gated_window(),
        only("use_mrope", False),
    ),
    tensors=_TENSORS,
    prefix="model.",
)

# A Llama whose query and key heads have a norm and a width of their own.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**_OPTIONS, "qk_norm": True},
    fields=(
        *_COMMON,
        value("num_key_value_heads", "kv_heads", int, 32, optional=True),
        value("head_dim", "head_dim", int, 128),
        biases(attention_bias=("qkv", "proj")),
        gated_window(),
    ),
    tensors={
        **_TENSORS,
        "attn.q_norm": ("model.layers.{}.self_attn.q_norm",),
        "attn.k_norm": ("model.layers.{}.self_attn.k_norm",),
    },
    prefix="model.",
)

# Rotary positions and grouped queries, with GPT-2's norms, MLP and biases.
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"position": "rope", "norm": "layer"},
    fields=(
        *_SIZES,
        value("num_key_value_heads", "kv_heads", int, 2),
        _HEAD_DIM,
        activation("hidden_act", {"gelu_pytorch_tanh": "gelu", "relu": "relu"}),
        value("norm_epsilon", "norm_eps", float, 1e-5),
        ROPE,
        window(default=None),
        biases(True, use_bias=PROJECTIONS),
        value("tie_word_embeddings", "tied", bool, True),
        dropout(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0),
        only("norm_type", "layer_norm"),
        only("mlp_type", "default"),
    ),
    harmless=frozenset({"layer_norm_epsilon"}),  # transformers itself goes by norm_epsilon
    tensors={
        **_TENSORS,
        "mlp.fc": ("model.layers.{}.mlp.c_fc",),
        "mlp.out": ("model.layers.{}.mlp.c_proj",),
    },
    prefix="model.",
)

ARCHITECTURES: Final = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, STARCODER2)
