"""Initial values that a user's constructor draws: they are left out, and noticed if torch does not
draw the same ones again."""

from __future__ import annotations

import sys
from typing import Any, Final, Self

from torch import nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

_DRAWING: Final = frozenset({"normal_", "uniform_"})
_WITHOUT_MODES: Final = {
    name: getattr(nn.init, name) for name in ("orthogonal_", "sparse_", "trunc_normal_")
}
"""Functions of torch.nn.init that draw without asking a mode first."""
RESETS: Final = ("reset_parameters", "_reset_parameters")
"""Methods by which modules of torch draw their initial values."""


class Undrawn(TorchFunctionMode):
    """Leave parameters as they are allocated: their values are drawn later, shard by shard.

    Notes those that other code than torch's modules and `reset_parameters` would draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: set[int] = set()

    def noted(self, module: nn.Module) -> str | None:
        """Return the name of the first of them in a module."""
        return next((n for n, p in module.named_parameters() if id(p) in self._noted), None)

    def __enter__(self) -> Self:
        for name, function in _WITHOUT_MODES.items():
            setattr(
                nn.init, name, wrap_torch_function(lambda tensor, *_, **__: (tensor,))(function)
            )
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for name, function in _WITHOUT_MODES.items():
            setattr(nn.init, name, function)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = _drawn_by(func, args, kwargs)
        if drawn is None:
            return func(*args, **(kwargs or {}))
        if not _by_a_reset():
            self._noted.add(id(drawn))
        return drawn


def _drawn_by(func: Any, args: Any, kwargs: Any) -> nn.Parameter | None:
    """Return the parameter that a call draws, if it draws one."""
    # A function of torch.nn.init comes by its own name, and then runs with the mode off.
    of_init = getattr(func, "__module__", None) == "torch.nn.init"
    if of_init or getattr(func, "__name__", "") in _DRAWING:
        drawn = args[0] if args else kwargs["tensor"]  # as torch.nn.init passes it on
        return drawn if isinstance(drawn, nn.Parameter) else None
    return None


def _by_a_reset() -> bool:
    """Return whether torch's modules, or a `reset_parameters`, have called what is drawn now."""
    frame = sys._getframe(1)
    between = (__name__, "torch.nn.init", "torch.overrides")
    while frame.f_back is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__"))
    return module.startswith("torch.nn.") or frame.f_code.co_name in RESETS
