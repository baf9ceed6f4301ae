"""Count steps of optimizers that torch.compile has compiled: no hook of theirs runs any more."""

from __future__ import annotations

from typing import Any


class Compiled:
    """Attributes that hooks set while torch.compile traces them: it makes setting them a part of
    the compiled code, so each run sets them again."""

    optimizer: Any = None
    """The optimizer that has stepped."""

    def note(self, recorder: Any) -> None:
        """Note a compiled step, if there was one."""
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is not None:
            recorder.optimizers.add(optimizer)
            recorder.stepping.add(id(optimizer))
            recorder.has_optimizer, recorder.stepped = True, recorder.in_step


COMPILED = Compiled()
