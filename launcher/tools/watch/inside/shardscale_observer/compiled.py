"""Count steps of optimizers that torch.compile has compiled: no hook of theirs runs any more."""

from __future__ import annotations

from typing import Any


class Compiled:
    """What a hook sets here while torch.compile traces it is set again behind each run of the
    compiled code."""

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
