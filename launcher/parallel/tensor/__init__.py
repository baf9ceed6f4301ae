"""Tensor parallelism: each rank holds some heads, some of the MLP's width, some of the vocabulary.

Between the matrices, where norms, dropout and residual sums are, each rank holds some of the rows
of [B*T, d] instead (Megatron's sequence parallelism, arXiv:2205.05198), so that no long-lived
activation is replicated. A decoder of transformers has all rows on each rank there (`foreign.py`).
"""
