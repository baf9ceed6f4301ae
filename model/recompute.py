"""Selective activation checkpointing: never recompute a matmul or an attention.

torch's own `create_selective_checkpoint_contexts` refuses any operator in the recomputation that
it did not meet in the forward. Parameters that are gathered on demand (ZeRO-3) are fetched by
other operators the second time, so these two modes look only at the operators that are kept.
"""

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from model.attention import FUSED_OPS
from model.config import ModelConfig

_LINEAR_OPS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_BATCHED_MATMUL_OPS = frozenset({torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})

_Kept = defaultdict[Any, deque[Any]]


def selective_contexts(config: ModelConfig) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The pair that `torch.utils.checkpoint` wants as `context_fn`: forward, recomputation."""
    kept: _Kept = defaultdict(deque)
    return _Keep(config, kept), _Reuse(config, kept)


def _keeps(config: ModelConfig, op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator's output is kept: matmuls and attention, not norms or activations."""
    if op in FUSED_OPS:
        # Skipping a kernel that draws random numbers would shift every later dropout mask.
        return config.dropout == 0.0
    if op in _LINEAR_OPS:
        # The last projection's output feeds only the residual sum: backward never asks for it,
        # and recomputation ends before reaching it. Known by its [d_ff, d_model] operand.
        last = tuple(args[-1].shape) == (config.ffn_dim, config.d_model)
        return not last or config.ffn_dim == config.d_model
    return op in _BATCHED_MATMUL_OPS


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, config: ModelConfig, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.kept = kept


class _Keep(_Mode):  # type: ignore[no-untyped-call]
    """Runs everything, and remembers the outputs worth their memory, in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _keeps(self.config, func, args):
            self.kept[func].append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class _Reuse(_Mode):  # type: ignore[no-untyped-call]
    """Hands the remembered outputs back in the same order, and recomputes the rest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _keeps(self.config, func, args):
            return self.kept[func].popleft()
        return func(*args, **(kwargs or {}))
