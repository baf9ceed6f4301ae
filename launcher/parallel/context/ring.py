"""Ring attention (arXiv:2310.01889): queries stay local, K/V blocks circulate around the ring.

A sequence of T tokens has 2n chunks, and rank r of n holds chunks r and 2n-1-r ("zigzag"),
an early one that sees little and a late one that sees much. So every rank has the same number of
pairs to score in every step; with consecutive tokens the first ranks would wait for the last.

Results of steps are merged by the log-sum-exp of their scores, as FlashAttention merges blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.model.attention import AttentionFunction
from launcher.model.attention.dense import repeat_for
from launcher.model.derived import as_one
from launcher.parallel.groups import ContextGroup


def ring(context_group: ContextGroup) -> AttentionFunction:
    """Causal attention over the tokens of a context-parallel group, of which each rank has its
    `ContextRank.local_ranges`.

    All ranks call it in the same order. It knows no mask, window or dropout.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: None, window: int | None, dropout: float
    ) -> Tensor:
        out: Tensor = _Ring.apply(q, k, v, context_group)
        return out

    return attend


class _Ring(torch.autograd.Function):
    """q [B, H, t, e], k and v [B, Hkv, t, e] -> [B, H, t, e], with t = T / n."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context_group: ContextGroup) -> Tensor:
        out, lse = as_one(lambda: _merged(q, k, v, context_group), attention=True)
        ctx.context_group = context_group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Circulate K/V once more; their gradients follow one step behind, so that they are sent
        while the next step computes, and are back at their rank after the last."""
        q, k, v, out, lse = ctx.saved_tensors
        kv = torch.stack((k, v))
        # Summed over all steps, so in fp32.
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for source, (k_there, v_there) in _circulate(kv, ctx.context_group):
            queries, keys, causal = _visible(ctx.context_group.rank.index, source, q.size(2))
            gradients = _attend_backward(
                grad[:, :, queries],
                q[:, :, queries],
                k_there[:, :, keys],
                v_there[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                causal,
            )
            if arriving is not None:
                dkv = arriving()
            for total, gradient in zip(
                (dq[:, :, queries], *dkv[:, :, :, keys]), gradients, strict=True
            ):
                total += gradient
            arriving = ctx.context_group.ring_exchange(dkv)
        assert arriving is not None
        dk, dv = arriving()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _merged(q: Tensor, k: Tensor, v: Tensor, context_group: ContextGroup) -> tuple[Tensor, Tensor]:
    """Output [B, H, t, e] and log-sum-exp [B, H, t] over the keys of all ranks."""
    batch, heads, tokens, head_size = q.shape
    # In memory [B, t, H, e], which the output projection and some kernels' backward read.
    out = q.new_zeros((batch, tokens, heads, head_size), dtype=torch.float32).transpose(1, 2)
    lse = q.new_full((batch, heads, tokens), float("-inf"), dtype=torch.float32)
    for source, (k_there, v_there) in _circulate(torch.stack((k, v)), context_group):
        queries, keys, causal = _visible(context_group.rank.index, source, tokens)
        local = _attend(q[:, :, queries], k_there[:, :, keys], v_there[:, :, keys], causal)
        _merge(out[:, :, queries], lse[:, :, queries], *local)
    return out.to(q.dtype), lse


def _visible(rank: int, source: int, tokens: int) -> tuple[slice, slice, bool]:
    """Return (queries of `rank`, keys of `source`, causal): half of all pairs in each case."""
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:  # its late chunk is later than both of ours
        return slice(None), slice(None, tokens // 2), False
    return slice(tokens // 2, None), slice(None), False  # only our late chunk is later than theirs


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add the contribution of other keys in place. out [B, H, t, e] and lse [B, H, t], fp32; lse
    is -inf where no key was seen yet."""
    # The new keys' share, exp(b) / (exp(a) + exp(b)): 1 where a, lse, is -inf.
    weight = torch.sigmoid(other_lse - lse)
    out.lerp_(other.float(), weight[..., None])
    lse.copy_(torch.logaddexp(lse, other_lse))


def _circulate(kv: Tensor, context_group: ContextGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its keys and values), this rank's first. The next ones are sent while the caller
    computes. kv [2, B, Hkv, t, e]."""
    rank, ranks = context_group.rank.index, context_group.rank.size
    for step in range(ranks - 1):
        arriving = context_group.ring_exchange(kv)
        yield (rank - step) % ranks, kv
        kv = arriving()
    # After ranks - 1 steps that of the next rank is here; it is sent no further.
    yield (rank + 1) % ranks, kv


# PyTorch's own kernels, by the operators that return the log-sum-exp, which
# F.scaled_dot_product_attention does not, and whose backward takes that of all keys.


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """-> output [B, H, tq, e] and log-sum-exp [B, H, tq] fp32 of q [B, H, tq, e] on k and v
    [B, Hkv, tk, e]."""
    if q.device.type == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = on_cpu(q, k, v, 0.0, causal)
    elif q.dtype == torch.float32:
        k, v = _for_each_query(q, k, v)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = efficient(q, k, v, None, True, 0.0, causal)  # with lse, no bias or dropout
        lse = lse[:, :, : q.size(2)]  # it fills up to a multiple of 32
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from those of the output, as `_attend` has the shapes; out and lse
    are those of all keys of the sequence, not only of these."""
    if q.device.type == "cpu":
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = on_cpu(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv
    if q.dtype == torch.float32:
        kv_heads = k.size(1)
        k, v = _for_each_query(q, k, v)  # the kernel takes no grouped queries
        # Queries that fill the last 32 have no weight; the output is read as dense [B, t, H, e].
        lse = F.pad(lse, (0, -lse.size(2) % 32), value=float("inf"))
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        unused = torch.zeros((), dtype=torch.int64)  # random state, for dropout
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, k, v, None, out, lse, unused, unused),
            *(0.0, [True, True, True, False], causal),
        )
        if q.size(1) > kv_heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        return dq, dk, dv
    # The kernel reads the log-sum-exp without strides. Random state is for dropout.
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad, q, k, v, out, lse.contiguous()),
        *(None, None, q.size(2), k.size(2), 0.0, causal),
        *(q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)),
    )
    return dq, dk, dv


def _for_each_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with a head for each of q's; copied only where some are shared."""
    return repeat_for(q, k, v) if q.size(1) > k.size(1) else (k, v)
