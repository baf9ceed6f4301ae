"""Decoders of transformers as large as seed-134m, by their model_type."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIZES = {
    **{"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "head_dim": 64},
    **{"intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_EXPERTS = {
    **{"num_hidden_layers": 6, "intermediate_size": 1024, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02},
}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "phi3": {},
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 64},
    "olmo2": {},
    "mixtral": _EXPERTS,
    "gpt_oss": {
        **_EXPERTS,
        "sliding_window": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def write_config(name: str, folder: Path) -> Path:
    """Write the config.json of a decoder into a folder of its own, and return that."""
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    content = {"model_type": name, **_SIZES, **DECODERS[name]}
    (own / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    return own
