"""Counter of operators that pass torch's dispatcher."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()  # operator -> times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
