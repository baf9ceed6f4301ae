"""Matrices cut over ranks: each has some heads, some of the MLP's width, some of the vocabulary.

Between the matrices, where norms, dropout and residual sums are, each has some of the rows of
[B*T, d] instead (Megatron's way, arXiv:2205.05198), so nothing that lives long is whole anywhere.
"""
