"""Qwen2ForCausalLM, Qwen 2 and 2.5: a Llama with biases on queries, keys and values."""

from launcher.config.families.base import Family
from launcher.config.families.fields import GatedWindow, Only, Value
from launcher.config.families.llama import COMMON, HEAD_DIM, OPTIONS, TENSORS

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={**OPTIONS, "qkv_bias": True},
    fields=(
        *COMMON,
        Value("num_key_value_heads", "kv_heads", int, 32, optional=True),
        HEAD_DIM,
        GatedWindow(),
        Only("use_mrope", False),
    ),
    tensors=TENSORS,
    prefix="model.",
)
