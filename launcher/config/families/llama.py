"""LlamaForCausalLM, and what most decoders since have kept of it."""

from launcher.config.families.base import Family
from launcher.config.families.fields import ActivationName, Only, Value
from launcher.config.families.rope import Rope

OPTIONS = {"position": "rope", "norm": "rms", "attention_bias": False, "mlp_bias": False}
SIZES = (
    Value("vocab_size", "vocab_size", int),
    Value("max_position_embeddings", "context", int),
    Value("hidden_size", "d_model", int),
    Value("intermediate_size", "d_ff", int),
    Value("num_hidden_layers", "layers", int),
    Value("num_attention_heads", "heads", int),
)
HEAD_DIM = Value("head_dim", "head_dim", int, optional=True)
SWIGLU = ActivationName("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
RMS_EPS = Value("rms_norm_eps", "norm_eps", float, 1e-6)
UNTIED = Value("tie_word_embeddings", "tied", bool, False)
NO_DROPOUT = Only("attention_dropout", 0.0)
COMMON = (*SIZES, SWIGLU, RMS_EPS, Rope(), UNTIED, NO_DROPOUT)
"""Of all of them."""
ATTENTION_BIAS = Value("attention_bias", "attention_bias", bool, False)

TENSORS = {
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

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed=OPTIONS,
    fields=(
        *COMMON,
        Value("num_key_value_heads", "kv_heads", int, optional=True),
        HEAD_DIM,
        ATTENTION_BIAS,
        Value("mlp_bias", "mlp_bias", bool, False),
        Only("pretraining_tp", 1),
        Only("rope_interleaved", False),
    ),
    harmless=frozenset({"is_llama_config"}),
    tensors=TENSORS,
    prefix="model.",
    # Frequencies, which older versions of transformers have saved with the weights.
    buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
