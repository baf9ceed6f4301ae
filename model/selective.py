"""Selective checkpointing of any block: a dispatch mode saves the results of some operators, and
returns them when the block is rerun in backward.

torch's own `create_selective_checkpoint_contexts` refuses any operator in the recomputation that
it did not meet in the forward. Parameters that are gathered on demand (ZeRO-3) are fetched by
other operators the second time, so the two modes here look only at the operators that are kept.
Compiled code has no dispatch modes; there torch's own contexts mark what the compiler keeps.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from launcher.model.checkpointing import PRODUCTS, kept_products
from launcher.model.config import ModelConfig
from launcher.model.derived import SELECTIVE, as_one
from launcher.model.products import linear_products

# Fused kernels, which selective checkpointing keeps the output of; those of packages by namespace.
FUSED_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._flash_attention_forward.default,
    }
)
_FUSED_NAMESPACES = frozenset({"flash_attn"})
# Where the weight is among their arguments. torchao's products in fp8 come as `mm` of its own
# tensors; without those, as in a plan, they come as the kernel.
_LINEAR_OPS = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    torch.ops.aten._scaled_mm.default: 1,
}
_BATCHED_MATMUL_OPS = frozenset({torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})

T = TypeVar("T")
_Kept = defaultdict[Any, deque[Any]]


def selective_contexts(
    products: Callable[[], AllProducts | BlockProducts], *, sees_all: bool = True
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Make the contexts of forward and recomputation for `torch.utils.checkpoint`.

    Args:
        sees_all: every operator passes the dispatch mode, at two or three times its own host time;
            otherwise only those of functions that are `seen`.
    """
    kept: _Kept = defaultdict(deque)
    # One each, since `BlockProducts` uses up its list of what comes next.
    modes = _Selective(products(), kept), _Selective(products(), kept, recomputes=True)
    forward, again = (_current(mode, sees_all) for mode in modes)
    return forward, again


@contextlib.contextmanager
def _current(mode: _Selective, sees_all: bool) -> Iterator[None]:
    token = SELECTIVE.set(mode)
    try:
        with mode if sees_all else contextlib.nullcontext():
            yield
    finally:
        SELECTIVE.reset(token)


def compiled_contexts(products: Callable[[], AllProducts | BlockProducts]) -> Any:
    """Make torch's own contexts, which mark for the compiler what is kept."""
    forward, again = products(), products()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = (again if ctx.is_recompute else forward).keeps(op, args)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class AllProducts:
    """Tells which operators make a product that is kept, in a block of any decoder: linear ones and
    fused attention, but for the second product of an adapter, which is as wide and cheap."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def keeps(self, op: Any, args: tuple[Any, ...]) -> bool:
        if op in FUSED_OPS:
            return not _draws_numbers(op, args)
        return op in _LINEAR_OPS and args[_LINEAR_OPS[op]].size(0) != self._rank

    def keeps_as_one(self, attention: bool) -> bool:
        return True


def _draws_numbers(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether fused attention drops weights: to skip it would shift every later mask."""
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    return at < len(args) and args[at] > 0.0


class BlockProducts:
    """Tells which operators make a product of a block that is kept, asked for each in order: once
    in the forward, and once more in the recomputation."""

    def __init__(self, config: ModelConfig) -> None:
        self._kept = kept_products(config.activation_checkpointing)
        # Skipping a kernel that draws random numbers would shift every later dropout mask.
        self._keeps_fused = "attention" in self._kept and config.dropout == 0.0
        self._expected = deque(linear_products(config))

    def keeps(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator's output is kept: a matmul's or attention's, not a norm's."""
        if op in FUSED_OPS or getattr(op, "namespace", None) in _FUSED_NAMESPACES:
            return self._keeps_fused
        if op in _LINEAR_OPS:
            weight = args[_LINEAR_OPS[op]]
            if self._expected and tuple(weight.shape) == self._expected[0].shape:
                return self.keeps_next_linear()
            return self._kept == PRODUCTS
        return op in _BATCHED_MATMUL_OPS and "attention" in self._kept

    def keeps_next_linear(self) -> bool:
        """Return whether the output of the block's next linear product is kept."""
        return self._expected.popleft().kept_with in self._kept

    def keeps_as_one(self, attention: bool) -> bool:
        return "attention" in self._kept if attention else self.keeps_next_linear()


class _Selective(TorchDispatchMode):
    """Keeps the outputs worth their memory, and hands them back in the recomputation, in order."""

    def __init__(
        self, products: AllProducts | BlockProducts, kept: _Kept, *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self._products, self._kept, self._recomputes = products, kept, recomputes
        self.sees, self._inside = False, False
        self._handed_back: set[StorageWeakRef] = set()

    def __enter__(self) -> _Selective:
        self.sees = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.sees = False

    def as_one(self, compute: Callable[[], T], attention: bool) -> T:
        """Run `compute` as one operator and ignore those inside."""

        def alone() -> T:
            self._inside = True
            out = compute()
            self._inside = False
            return out

        return self._kept_or(as_one, alone, self._products.keeps_as_one(attention))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = self._handed_back and func._schema.is_mutable and isinstance(args[0], Tensor)
        if changes and _storage(args[0]) in self._handed_back:
            return args[0]  # what is kept was changed in the forward already
        keeps = not self._inside and self._products.keeps(func, args)
        return self._kept_or(func, partial(func, *args, **(kwargs or {})), keeps)

    def _kept_or(self, key: Any, compute: Callable[[], T], keeps: bool) -> T:
        if not keeps:
            return compute()
        if self._recomputes:
            out: T = self._kept[key].popleft()
            self._handed_back.update(_storage(t) for t in tree_leaves(out) if isinstance(t, Tensor))
            return out
        out = compute()
        self._kept[key].append(tree_map_only(Tensor, Tensor.detach, out))
        return out


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Refer to memory without keeping it; no later storage is equal."""
    return StorageWeakRef(tensor.untyped_storage())
