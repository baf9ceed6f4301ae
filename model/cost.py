"""Arithmetic of a token."""

from __future__ import annotations

from launcher.model.config import ModelConfig


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_len` tokens.

    6 N + 12 L d T from appendix B of the PaLM paper (arXiv:2204.02311): N matmul parameters at
    2 FLOPs in forward and 4 in backward; L layers of Q K^T and A V over T positions, all heads d
    wide. As there, no discount for the causal half, a window or recomputation, so that figures
    compare with published ones. Frozen weights have no gradients: 4 N, and 6 of the adapters'.
    """
    attention = 12 * config.layers * config.attention_dim * seq_len
    if config.lora is None:
        return 6 * config.matmul_parameter_count + attention
    return 4 * config.matmul_parameter_count + 6 * config.trained_parameter_count + attention
