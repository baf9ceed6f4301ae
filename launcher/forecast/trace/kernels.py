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
- Dropout keeps a mask of one byte per element, where a CPU's has the type of its input.
- Norms, SwiGLU and the rotary embedding of shardscale's own decoder are its own kernels, which are
  traced as they run (`launcher.model.fused`); a plan of another trainer's run has torch's.
- The loss is fused, and a product of low precision is added to an fp32 sum in place.
- A sum over many rows, as of a bias's gradient, takes memory of its own meanwhile
  (`partial_sums_bytes`), and so does attention's backward (`Recorder`): cuDNN's, FlashAttention's
  and the memory-efficient one in torch's CUDA build. What FA2 takes more for shared key heads, and
  where heads or sequences are no multiples of its tiles, is left out.
- Linears in fp8 are torchao's: `launcher.forecast.trace.fp8`.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from launcher.forecast.trace.counting import WorkCounter, as_kernel, note_product
from launcher.forecast.trace.events import Compute
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


def _add_in_place(total: Tensor, left: Tensor, right: Tensor) -> None:
    """A product that is added to `total`, which takes no memory of its own."""
    note_product(left, right, total, total=total)


def layer_norm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """aten::native_layer_norm, whose mean and deviation of each row are in fp32 on a GPU, and on a
    CPU in the type of the input."""
    out, mean, deviation = torch.ops.aten.native_layer_norm(*args)
    return out, mean.float(), deviation.float()


def partial_sums_bytes(
    rows: int, columns: int, element_bytes: int, *, resident_threads: int
) -> int:
    """Return what a sum over the rows of a contiguous matrix takes for the fp32 sums of its thread
    blocks while it runs; 0 where each column is summed by one block.

    As setReduceConfig in torch 2.13.0's aten/src/ATen/native/cuda/Reduce.cuh cuts up the work.
    """
    while rows * columns * element_bytes > _MOST_INDEXED_BYTES:
        rows = -(-rows // 2)
    vector = math.gcd(columns, 4)
    most_threads = 512 // vector
    widest = min(_power_of_two(columns // vector), most_threads)
    height = min(_power_of_two(rows), most_threads // min(widest, 32))
    width = min(widest, most_threads // height)
    rows_per_thread = -(-rows // height)
    across = -(-(columns // vector) // width)
    blocks_at_a_time = resident_threads // (width * height)
    if rows_per_thread < 256 or across > blocks_at_a_time:
        return 0
    down = min(-(-blocks_at_a_time // across), -(-rows_per_thread // 16))
    down = max(down, -(-rows_per_thread // 256))
    return 4 * columns * vector * width * down if down > 1 else 0


_MOST_INDEXED_BYTES = 2**31 - 1  # by a kernel; larger tensors are halved (TensorIterator)


def _power_of_two(number: int) -> int:
    """The largest up to `number`."""
    return 1 << (number.bit_length() - 1)


@contextlib.contextmanager
def gpu_kernels(
    model: ModelConfig, compute: Compute, counter: WorkCounter
) -> Iterator[ModelConfig]:
    """Have norms, attention and loss allocate as on a GPU; gives the model to trace in the place of
    `model`."""
    attention, composed_norm = F.scaled_dot_product_attention, F.rms_norm
    own_kernel = kernel_for(model).skips_window  # these take shared key heads in every type
    backend = BACKENDS.get(model.sdpa_backend)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **how: Any,
    ) -> Tensor:
        # Of transformers' decoders, on a GPU in every type; our own repeats heads there.
        by_torch = isinstance(model, ForeignConfig) and how.get("enable_gqa", False)
        computed = head_loss.compute_dtype(q) if by_torch else q.dtype
        shared = own_kernel or takes_groups("cuda", computed, attn_mask, backend)
        if q.size(1) > k.size(1) and not shared:
            if by_torch:
                return _composed_attention(q, k, v, attn_mask, dropout_p, **how)
            k, v = repeat_for(q, k, v)
        dropped = dropout_p if backend is SDPBackend.MATH else 0.0
        out: Tensor = attention(q, k, v, attn_mask=attn_mask, dropout_p=dropped, **how)
        return out

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

    if own_kernel:
        counter.visible_keys = model.window
        model = replace(model, attention="auto", window=None)
    elif model.sdpa_backend in ON_GPUS_ONLY:
        model = replace(model, sdpa_backend="auto")
    changes: list[tuple[Any, str, Any]] = [
        *((F, "scaled_dot_product_attention", attend), (F, "rms_norm", rms_norm)),
        *((F, "dropout", dropout), (fused, "fuses", lambda device_type: True)),
        (head_loss, "add_product_", _add_in_place),
    ]
    if not compute.own_kernels:
        changes.append((fused, "takes", lambda x: False))
    with _changed(changes):
        yield model


@contextlib.contextmanager
def _changed(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes of modules other values."""
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


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
    """Attention without a fused kernel, which keeps all T x T scores."""
    composed = torch.ops.aten._scaled_dot_product_attention_math
    how = {"scale": scale, "enable_gqa": enable_gqa}
    out: Tensor = composed(q, k, v, mask, dropout_p, is_causal, None, **how)[0]
    return out
