"""Kernels that differ from those of the CPU that records: what they keep, move and multiply.

One entry for each, with its source; bytes and work are both read off what runs here.

- RMSNorm is one kernel on a GPU, which saves its input and one fp32 number per row (torch 2.13.0's
  aten/src/ATen/native/layer_norm.cpp and cuda/layer_norm_kernel.cu). A CPU composes it of operators
  that each save what they need.
- LayerNorm keeps mean and deviation of a row in fp32 on a GPU, on a CPU in the type of its input.
- Attention that a CPU does not have is replaced by torch's fused one: all of them save queries,
  keys, values, the output and a number per row. They drop attention weights without a mask, which
  they draw again in backward; a CPU's fused one cannot drop any, and torch would hold all T x T
  scores. Shared key heads are repeated for the kernels that do not take them
  (`launcher.model.attention.dense`), unless the caller asks torch itself to share them, as
  transformers does: where no fused kernel can, all T x T scores are kept. What has a window of its
  own skips the rest.
- Softmax of fp16 into fp32 is one kernel on a GPU, which converts as it reads; of bf16 it is two
  (torch 2.13.0's aten/src/ATen/native/SoftMax.cpp).
- Dropout keeps a mask of one byte per element, where a CPU's has the type of its input.
- Norms, SwiGLU and the rotary embedding of shardscale's own decoder are its own kernels, which are
  traced as they run (`launcher.model.fused`); a plan of another trainer's run has torch's.
- The loss is fused, and a product of low precision is added to an fp32 sum in place.
- What kernels take while they run is in `launcher.forecast.trace.workspaces`.
- Linears in fp8 are torchao's: `launcher.forecast.trace.fp8`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from launcher.forecast.trace.counting import WorkCounter, as_kernel, note_product
from launcher.forecast.trace.events import Compute
from launcher.forecast.trace.patched import patched
from launcher.model import fused
from launcher.model import loss as head_loss
from launcher.model.attention import kernel_for
from launcher.model.attention.dense import BACKENDS, ON_GPUS_ONLY, repeat_for, takes_groups
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig


class _RMSNorm(torch.autograd.Function):
    """The storages of aten::_fused_rms_norm and its backward, without their values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        def kernel() -> Tensor:
            ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
            return torch.empty_like(x.contiguous())

        return as_kernel(kernel, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors

        def kernel() -> tuple[Tensor, Tensor | None]:
            whole = x.contiguous()  # a copy, while it runs, of heads that lie between others
            of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            return torch.empty_like(whole), of_weight

        return as_kernel(kernel, grad, x)


class _HalfSoftmax(torch.autograd.Function):
    """The storages of aten::_softmax from fp16 to fp32 and its backward, without their values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = as_kernel(lambda: torch.empty_like(x, dtype=torch.float32), x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors

        def kernel() -> Tensor:
            product = torch.empty_like(out)  # with the gradient, while it runs
            return torch.empty_like(product, dtype=torch.bfloat16)  # as which fp16 is recorded

        return as_kernel(kernel, grad, out)


def _add_in_place(total: Tensor, left: Tensor, right: Tensor) -> None:
    """A product that is added to `total`, which takes no memory of its own."""
    note_product(left, right, total, total=total)


def layer_norm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """aten::native_layer_norm, whose mean and deviation of each row are in fp32 on a GPU, and on a
    CPU in the type of the input."""
    out, mean, deviation = torch.ops.aten.native_layer_norm(*args)
    return out, mean.float(), deviation.float()


@contextlib.contextmanager
def gpu_kernels(
    model: ModelConfig, compute: Compute, counter: WorkCounter
) -> Iterator[ModelConfig]:
    """Have norms, attention and loss allocate as on a GPU; gives the model to trace in the place of
    `model`."""
    own_kernel = kernel_for(model).skips_window  # these take shared key heads in every type
    attention, composed_norm, asked = F.scaled_dot_product_attention, F.rms_norm, model
    composed_softmax = torch.softmax

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
        return _attend(attention, asked, own_kernel, q, k, v, *args, **how)

    def rms_norm(
        x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        # A compiler takes the kernel apart, too.
        if torch.compiler.is_compiling() or weight is None:
            normed: Tensor = composed_norm(x, shape, weight, eps)
        else:
            normed = _RMSNorm.apply(x, weight)
        return normed

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, train=True)[0] if training and p > 0.0 else x

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
        converts = compute.fp16 and x.dtype.itemsize == 2 and dtype is torch.float32
        if converts and not torch.compiler.is_compiling():
            weights: Tensor = _HalfSoftmax.apply(x)
            return weights
        return composed_softmax(x, dim, dtype=dtype)

    if own_kernel:
        # Causal attention without a window keeps the same; the counter subtracts what the window
        # skips.
        counter.visible_keys = model.window
        model = replace(model, attention="auto", window=None)
    elif model.sdpa_backend in ON_GPUS_ONLY:
        model = replace(model, sdpa_backend="auto")
    changes: list[tuple[Any, str, Any]] = [
        *((F, "scaled_dot_product_attention", attend), (F, "rms_norm", rms_norm)),
        *((torch, "softmax", softmax), (F, "softmax", softmax)),
        *((F, "dropout", dropout), (fused, "fuses", lambda device_type: True)),
        (head_loss, "add_product_", _add_in_place),
    ]
    if not compute.own_kernels:
        changes.append((fused, "takes", lambda x: False))
    with patched(*changes):
        yield model


def _attend(
    attention: Callable[..., Tensor],
    model: ModelConfig,
    own_kernel: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    **how: Any,
) -> Tensor:
    """Call torch's `attention` with what a GPU's kernels need, or compose it where none is able."""
    backend = BACKENDS.get(model.sdpa_backend)
    # Of transformers' decoders, on a GPU in every type; our own repeats heads there.
    by_torch = isinstance(model, ForeignConfig) and how.get("enable_gqa", False)
    computed = head_loss.compute_dtype(q) if by_torch else q.dtype
    shared = own_kernel or takes_groups("cuda", computed, attn_mask, backend)
    fused = own_kernel or _is_fused(computed, q.size(-1), attn_mask)
    if q.size(1) > k.size(1) and not shared:
        fused = fused and not by_torch
        k, v = (k, v) if by_torch else repeat_for(q, k, v)
    composed = backend is SDPBackend.MATH or not fused
    if composed and not torch.compiler.is_compiling():
        return _composed_attention(q, k, v, attn_mask, dropout_p, **how)
    dropped = dropout_p if composed else 0.0
    # fp32 takes the memory-efficient kernel, which does not pad
    missing = 0 if own_kernel or composed or computed.itemsize > 2 else -q.size(-1) % 8
    if not missing:
        return attention(q, k, v, attn_mask=attn_mask, dropout_p=dropped, **how)
    # As torch pads heads for FlashAttention, and keeps them so.
    width = q.size(-1)
    how = {"scale": 1 / math.sqrt(width), **how}
    q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    return attention(q, k, v, attn_mask=attn_mask, dropout_p=dropped, **how)[..., :width]


def _is_fused(computed: torch.dtype, head_size: int, mask: Tensor | None) -> bool:
    """Return whether a GPU of compute capability 8.0 or newer has a fused kernel: FlashAttention
    pads heads and takes no mask, the memory-efficient one needs 16 bytes (torch 2.13.0's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    by_flash = mask is None and computed in (torch.float16, torch.bfloat16)
    return by_flash or head_size * computed.itemsize % 16 == 0


def _composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention without a fused kernel, which keeps all T x T scores.

    As torch 2.13.0's _scaled_dot_product_attention_math, which adds the mask out of place where
    tensors are fake, and drops weights as a CPU does where they are on one.
    """
    cast = head_loss.compute_dtype(q)
    computed = torch.float32 if cast in (torch.float16, torch.bfloat16) else cast
    if is_causal:
        mask = torch.ones((q.size(-2), k.size(-2)), dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        hidden = mask.logical_not()
        mask = torch.zeros(mask.shape, dtype=computed).masked_fill_(hidden, -math.inf)
    factor = math.sqrt(1 / math.sqrt(q.size(-1)) if scale is None else scale)
    with torch.autocast("cpu", enabled=False):
        queries, keys, values = (x.to(cast).to(computed) for x in (q, k, v))
        queries = queries * factor
        if enable_gqa:
            keys, values = repeat_for(queries, keys, values)
        scores = queries @ (keys.transpose(-2, -1) * factor)
        weights = torch._safe_softmax(scores if mask is None else scores.add_(mask), -1)
        if dropout_p > 0.0:
            weights = torch.native_dropout(weights, dropout_p, train=True)[0]
        returned = (weights @ values).to(cast), weights.to(cast)  # the weights are not asked for
    return returned[0]
