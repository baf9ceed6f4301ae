"""Optimizers, their precision and learning rates. Knows parameters, but no strategies or ranks."""
