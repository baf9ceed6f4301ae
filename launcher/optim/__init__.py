"""Optimizers, each with what it keeps and where it runs; precisions; the learning-rate schedule."""
