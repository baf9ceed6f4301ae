"""MistralForCausalLM: a Llama with a sliding window and without biases."""

from launcher.config.families.base import Family
from launcher.config.families.fields import Value, Window
from launcher.config.families.llama import COMMON, HEAD_DIM, OPTIONS, TENSORS

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=OPTIONS,
    fields=(
        *COMMON,
        Value("num_key_value_heads", "kv_heads", int, 8, optional=True),
        HEAD_DIM,
        Window(default=4096),
    ),
    tensors=TENSORS,
    prefix="model.",
)
