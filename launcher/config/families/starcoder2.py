"""Starcoder2ForCausalLM: rotary positions and grouped queries, GPT-2's norms, MLP and biases."""

from launcher.config.families.base import Family
from launcher.config.families.fields import ActivationName, Dropout, Only, Value, Window
from launcher.config.families.llama import HEAD_DIM, SIZES, TENSORS
from launcher.config.families.rope import Rope

FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"position": "rope", "norm": "layer"},
    fields=(
        *SIZES,
        Value("num_key_value_heads", "kv_heads", int, 2),
        HEAD_DIM,
        ActivationName("hidden_act", {"gelu_pytorch_tanh": "gelu", "relu": "relu"}),
        Value("norm_epsilon", "norm_eps", float, 1e-5),
        Rope(),
        Window(default=None),
        Value("use_bias", "attention_bias", bool, True),
        Value("use_bias", "mlp_bias", bool, True),
        Value("tie_word_embeddings", "tied", bool, True),
        Dropout(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0),
        Only("norm_type", "layer_norm"),
        Only("mlp_type", "default"),
    ),
    harmless=frozenset({"layer_norm_epsilon"}),  # transformers itself goes by norm_epsilon
    tensors={
        **TENSORS,
        "mlp.fc": ("model.layers.{}.mlp.c_fc",),
        "mlp.out": ("model.layers.{}.mlp.c_proj",),
    },
    prefix="model.",
)
