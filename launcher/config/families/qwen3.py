"""Qwen3ForCausalLM: a Llama whose query and key heads have a norm and a width of their own."""

from launcher.config.families.base import Family
from launcher.config.families.fields import GatedWindow, Value
from launcher.config.families.llama import ATTENTION_BIAS, COMMON, OPTIONS, TENSORS

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**OPTIONS, "qk_norm": True},
    fields=(
        *COMMON,
        Value("num_key_value_heads", "kv_heads", int, 32, optional=True),
        Value("head_dim", "head_dim", int, 128),
        ATTENTION_BIAS,
        GatedWindow(),
    ),
    tensors={
        **TENSORS,
        "attn.q_norm": ("model.layers.{}.self_attn.q_norm",),
        "attn.k_norm": ("model.layers.{}.self_attn.k_norm",),
    },
    prefix="model.",
)
