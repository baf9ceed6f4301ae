"""Describe calls of FlexAttention's kernels, which torch.compile writes in Triton."""

from __future__ import annotations

from typing import Any


def flex_attention(kernel: Any, names: Any, args: Any) -> dict[str, Any] | None:
    """Return the shape of the attention that a kernel computes; None for other kernels."""
    called = str((getattr(kernel, "inductor_meta", None) or {}).get("kernel_name", ""))
    if "_tem_fused" not in called or "flex_attention" not in called:
        return None
    tensors = dict(zip(names, args))  # noqa: B905  (scalars follow)
    of_rows, blocks = tensors.get("arg_LSE"), tensors.get("arg_KV_IDX")
    out = tensors.get("arg_DO", tensors.get("out_ptr0"))
    if of_rows is None or blocks is None or out is None:
        return None
    # LSE is [B, H, rows]; KV_IDX [B, H, blocks of rows, blocks of columns], taken as square blocks
    batch, heads, rows = of_rows.shape
    masked = blocks.numel() > 1  # without a mask one block has all keys
    # Queries, keys and values may be views of one tensor, of which the kernel gets the whole.
    return {
        "sequences": batch * heads,
        "rows": rows,
        "columns": rows * blocks.shape[-1] // blocks.shape[-2] if masked else rows,
        "width": out.numel() // of_rows.numel(),
        "dtype": str(out.dtype).rpartition(".")[2],
        "backward": "arg_DO" in tensors,
        "masked": masked,
    }
