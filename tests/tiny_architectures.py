"""Tiny configs of transformers' architectures: a config.json of each, by its model_type."""

from collections.abc import Mapping
from typing import Any

_SIZES = {
    **{"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}

_OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "falcon_h1": {"head_dim": 8, **_MAMBA, "mamba_chunk_size": 16, "lm_head_multiplier": 0.5},
    "gpt_neox": {},
    "stablelm": {},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.25},
    "smollm3": {},
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **_EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # without a router loss
    "gpt_oss": {
        **{"head_dim": 8, "num_local_experts": 4, "sliding_window": 8, **_EXPERTS},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi": {},  # its head has a bias
}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"model_type": name, **_SIZES, **own} for name, own in _OWN_FIELDS.items()},
    "opt": {
        **{"model_type": "opt", **_IDS, "vocab_size": 260, "hidden_size": 32, "ffn_dim": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
        **{"word_embed_proj_dim": 16, "dropout": 0.0},
    },
    "bloom": {
        **{"model_type": "bloom", "vocab_size": 260, "hidden_size": 32, "n_layer": 2},
        "n_head": 4,
    },
    "mamba2": {
        **{"model_type": "mamba2", **_IDS, "vocab_size": 260, "hidden_size": 32, "num_heads": 8},
        **{"num_hidden_layers": 2, "head_dim": 8, "state_size": 8, "n_groups": 1},
        **{"chunk_size": 16, "time_step_limit": [0.0, float("inf")]},
    },
}
