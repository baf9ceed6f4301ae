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
    "qwen3_moe": {"head_dim": 8, "num_experts": 3, "moe_intermediate_size": 16, **_EXPERTS},
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

WIDE: Mapping[str, Mapping[str, Any]] = {
    "olmo2-64": {**ARCHITECTURES["olmo2"], "hidden_size": 64, "intermediate_size": 64},
    "mixtral-512": {**ARCHITECTURES["mixtral"], "hidden_size": 64, "intermediate_size": 512},
}
"""Whose rows can be quantised, and whose experts ZeRO-3 does not leave gathered."""

_MORE_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"head_dim": 8},
    "olmo": {},
    "olmo3": {"sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "glm4": {"head_dim": 8},
    "nemotron": {},
    "exaone4": {"sliding_window": 8},
    "ernie4_5": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "arcee": {},
    "apertus": {},
    "seed_oss": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "granitemoe": {"num_local_experts": 4, **_EXPERTS},
    "qwen2_moe": {
        **{"num_experts": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        **_EXPERTS,
    },
    "deepseek_v2": {
        **{"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_experts_per_tok": 2, "head_dim": 8},
        **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    },
    "qwen3_next": {
        **{"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **_EXPERTS},
        **{"shared_expert_intermediate_size": 16, "full_attention_interval": 2},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "lfm2": {"full_attn_idxs": [1], "conv_L_cache": 3},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon": {"ffn_hidden_size": 48, "new_decoder_architecture": False},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "starcoder2": {},
}
MORE: Mapping[str, Mapping[str, Any]] = {
    name: {"model_type": name, **_SIZES, **own} for name, own in _MORE_FIELDS.items()
}
"""Further ones, which bench/architectures.py tries besides."""
