"""Optimizers, parameter groups and the learning-rate schedule."""

from launcher.optim.registry import OPTIMIZERS, build_optimizer, parameter_groups
from launcher.optim.schedule import learning_rate

__all__ = ["OPTIMIZERS", "build_optimizer", "learning_rate", "parameter_groups"]
