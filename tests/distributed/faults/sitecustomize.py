"""On PYTHONPATH, breaks the optimizer of rank FAULT_RANK when it is called for the third time, or
has the rank wait for a file, FAULT_UNTIL, where its agent starts it first.

The interpreter imports this by itself, so the command that is tested stays the real one.
"""

import os
import time
from pathlib import Path
from typing import Any

ours = os.environ.get("RANK") == os.environ["FAULT_RANK"]
if ours and (until := os.environ.get("FAULT_UNTIL")):
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not Path(until).exists():
        time.sleep(0.05)
elif ours:  # the torchrun agent has no RANK
    import torch

    class BrokenAdamW(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 3:
                if os.environ["FAULT"] == "raise":
                    raise RuntimeError("the moments went missing")
                time.sleep(3600)
            return super().step(closure)

    torch.optim.AdamW = BrokenAdamW  # type: ignore[misc]  # mypy lets no class be replaced
