"""Share out the tokens of a mixture of experts that asks the device which each expert has, or how
many.

A router is trained to balance them, so each expert gets an equal share of what was selected.
"""

from __future__ import annotations

import sys
from typing import Any

from shardscale_observer.alternatives import share_of_turn
from shardscale_observer.held import hold
from shardscale_observer.rules import frames, variables_of

COUNTS = (
    *("num_experts", "n_experts", "num_local_experts", "num_routed_experts"),
    *("n_routed_experts", "moe_num_experts"),
)
"""Attributes of modules that hold how many experts there are."""


_given: dict[tuple[int, int], tuple[int, str]] = {}
"""(address, elements) of each mask in forward -> its answer: backward asks again."""


def list_of_experts(mask: Any) -> Any:
    """Return the numbers of all experts, of shape (experts, 1), where a mixture asks which have
    tokens; None for other masks. One class more may stand for tokens that no expert takes."""
    frame = next(frames(), None)
    count = None if frame is None else _experts(frame)
    if count is None or mask.dim() != 1 or mask.numel() not in (count, count + 1):
        return None
    torch = sys.modules["torch"]
    found = torch.empty((count, 1), dtype=torch.int64, device=mask.device)
    hold(found, torch.arange(count).unsqueeze(1))
    return found


def share_of_mask(mask: Any) -> tuple[int, str] | None:
    """Return (elements, what has them) where a mixture asks which elements of `mask` one expert
    has, or a loop asks which one of its turns has; None for others, and for a mask of the experts
    themselves."""
    frame = next(frames(), None)
    key = (mask.data_ptr(), mask.numel())
    if frame is None:  # autograd's thread, which keeps the masks that it needs
        return _given.get(key)
    share = _share(frame, mask.numel())
    if share is None:
        _given.pop(key, None)
    else:
        _given[key] = share
    return share


def tokens_of_experts(counts: Any) -> list[int] | None:
    """Return the values of `counts` where that is how many tokens each expert of a mixture has, or
    the experts of each rank that tokens are sent to; None for other tensors."""
    frame = next(frames(), None)
    count = None if frame is None else _experts(frame)
    if frame is None or count is None or counts.dim() != 1 or not _whole(counts):
        return None
    ranks = _ranks()
    shares = int(counts.numel())
    if shares not in (count, ranks, count * ranks):
        return None
    # The router's indices, else the rows that the counts are to divide.
    selected = [n for n in _selections(frame) if n > count * ranks]
    if not selected:
        tensors = [
            v for v in variables_of(frame).values() if _is_tensor(v) and v.is_floating_point()
        ]
        selected = [v.shape[0] for v in tensors if v.dim() == 2]
    if not selected:
        return None
    # the first experts get the remainder, so that the counts add up
    each, more = divmod(min(selected), shares)
    return [each + (share < more) for share in range(shares)]


def _share(frame: Any, most: int) -> tuple[int, str] | None:
    count = _experts(frame)
    if count is None:
        turn = share_of_turn(frame, most)
        return None if turn is None else (turn[0], f"one of {turn[1]} turns of its loop")
    if most <= count + 1:
        return None
    # Of tokens there are fewer than of the router's indices, and of one-hot vectors more.
    fit = (n for n in _selections(frame) if most <= n < most * count and n % most == 0)
    return min(-(-min(fit, default=most) // count), most), f"one of {count} experts"


def _selections(frame: Any) -> list[int]:
    """Return the sizes of a frame's whole-numbered tensors, of which one is the router's choice."""
    return [v.numel() for v in variables_of(frame).values() if _is_tensor(v) and _whole(v)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


def _whole(tensor: Any) -> bool:
    return str(tensor.dtype) in ("torch.int64", "torch.int32")


def _ranks() -> int:
    distributed = sys.modules["torch"].distributed
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _experts(frame: Any) -> int | None:
    """Return how many experts the module has whose code runs in the frame; None if none."""
    own = frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 1)]  # a method's first argument
    variables = variables_of(frame)
    found = (variables.get(name) for name in (*own, "self"))
    modules = (one for one in found if isinstance(one, sys.modules["torch"].nn.Module))
    module = next(modules, None)
    if module is None:
        return None
    for name, child in module.named_children():
        if "expert" in name.lower() and hasattr(child, "__len__") and len(child) > 1:
            return len(child)
    for name in COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 1:
            return count
    return None
