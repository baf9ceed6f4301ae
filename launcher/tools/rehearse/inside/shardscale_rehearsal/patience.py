"""Let no callback of a library stop a training whose loss does not fall: all losses read alike.

What it decides from the loss, and with how much patience, is kept; only the end is left out.
"""

from __future__ import annotations

import functools
from typing import Any


def prepare_transformers(module: Any) -> None:
    """Begin transformers' patience anew after each evaluation."""
    callback = module.EarlyStoppingCallback
    check = callback.check_metric_value

    @functools.wraps(check)
    def check_without_end(self: Any, *args: Any, **kwargs: Any) -> None:
        check(self, *args, **kwargs)
        self.early_stopping_patience_counter = 0

    callback.check_metric_value = check_without_end


def prepare_lightning(module: Any) -> None:
    """Let Lightning's callback find no reason to stop."""
    callback = module.EarlyStopping
    evaluate = callback._evaluate_stopping_criteria

    @functools.wraps(evaluate)
    def evaluate_without_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _, *reason = evaluate(self, *args, **kwargs)
        return (False, *reason)

    callback._evaluate_stopping_criteria = evaluate_without_end
