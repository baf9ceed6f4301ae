"""Memory that kernels of torch's CUDA build take while they run, beside what they return.

- A sum over many rows, as of a bias's gradient, has the fp32 sums of its thread blocks.
- Attention's backward has the gradient of queries in fp32 and a number for each: cuDNN's,
  FlashAttention's and the memory-efficient one. FlashAttention's has those of shared keys and
  values for each head of queries, too. What it takes more where heads or sequences are no
  multiples of its tiles is left out.
- An embedding's gradient over more than 3,072 tokens has the fp32 sums of each token's positions
  (torch 2.13.0's aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu).
- Softmax multiplies its output with the gradient before its backward, and where whole rows may be
  masked it looks for them afterwards (torch 2.13.0's aten/src/ATen/native/cuda/SoftMax.cu and
  transformers/attention.cpp).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from launcher.forecast.trace.events import Compute, WorkspaceBytes, WorkspaceOf

_ATEN: Final = torch.ops.aten
_MOST_INDEXED_BYTES: Final = 2**31 - 1
"""By one kernel; larger tensors are halved (TensorIterator)."""


_FEW_TOKENS: Final = 3072
"""Whose gradients one kernel adds up without sorting them."""
_TOKENS_PER_THREAD: Final = 10


def workspaces(func: Any, args: Sequence[Any], workspace_bytes: WorkspaceBytes) -> list[Tensor]:
    """Return tensors as large as what an operator takes on a GPU while it runs."""
    if func is _ATEN.sum.dim_IntList:
        summed, dims, *_ = args
        return _taken(_of_sum(summed, dims, workspace_bytes))
    if func is _ATEN.embedding_dense_backward.default:
        gradient, tokens, rows, *_ = args
        return _taken(workspace_bytes("embedding", (tokens.numel(), rows, gradient.size(-1))))
    if func is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default:
        _, queries, keys, *_ = args
        counts = (queries.numel(), queries.numel() // queries.size(-1))
        found = [torch.empty(count, dtype=torch.float32) for count in counts]
        if keys.size(1) < queries.size(1):
            for _ in ("keys", "values"):
                found += _taken(workspace_bytes("shared heads", (queries.nbytes,)))
        return found
    if func is _ATEN._softmax_backward_data.default:
        return [torch.empty(args[0].shape, dtype=args[0].dtype)]
    if func is _ATEN._safe_softmax.default:
        types = (args[0].dtype, torch.bool)  # before masked rows are 0, and where it is -inf
        return [torch.empty(args[0].shape, dtype=dtype) for dtype in types]
    return []


def _taken(size_bytes: int) -> list[Tensor]:
    return [torch.empty(size_bytes, dtype=torch.uint8)] if size_bytes else []


def _of_sum(summed: Tensor, dims: list[int], workspace_bytes: WorkspaceBytes) -> int:
    rows_only = summed.dim() > 1 and dims == [*range(summed.dim() - 1)]
    if not rows_only or not summed.is_contiguous():
        return 0
    columns = summed.size(-1)
    return workspace_bytes("sum", (summed.numel() // columns, columns, summed.element_size()))


def workspace_bytes(of: WorkspaceOf, sizes: Sequence[int], *, compute: Compute) -> int:
    """Return what a kernel takes on the GPU of `compute` while it runs.

    Args:
        sizes: rows, columns and bytes of an element that are summed; an embedding's tokens, rows
            and columns; bytes of the queries of attention whose heads share keys.
    """
    if of == "sum":
        rows, columns, element_bytes = sizes
        threads = compute.resident_threads
        return partial_sums_bytes(rows, columns, element_bytes, resident_threads=threads)
    if of == "embedding":
        tokens, rows, columns = sizes
        if tokens <= _FEW_TOKENS:
            return 0
        # max_partial_segment, each a row padded to a warp
        return 4 * (tokens // _TOKENS_PER_THREAD + min(tokens, rows)) * (-(-columns // 32) * 32)
    return sizes[0] if compute.heads_apart else 0


def partial_sums_bytes(
    rows: int, columns: int, element_bytes: int, *, resident_threads: int
) -> int:
    """Return what a sum over the rows of a contiguous matrix takes for the fp32 sums of its thread
    blocks while it runs; 0 where each column is summed by one block.

    As setReduceConfig in torch 2.13.0's aten/src/ATen/native/cuda/Reduce.cuh cuts up the work.
    """
    while rows * columns * element_bytes > _MOST_INDEXED_BYTES:
        rows = -(-rows // 2)
    # output_vec_size, block_width and block_height of its ReduceConfig; 512 is MAX_NUM_THREADS
    vector = math.gcd(columns, 4)
    most_threads = 512 // vector
    widest = min(_power_of_two(columns // vector), most_threads)
    height = min(_power_of_two(rows), most_threads // min(widest, 32))
    width = min(widest, most_threads // height)
    rows_per_thread = -(-rows // height)
    across = -(-(columns // vector) // width)
    blocks_at_a_time = resident_threads // (width * height)  # target_grid_size
    if rows_per_thread < 256 or across > blocks_at_a_time:
        return 0
    # ctas_per_output: each thread sums 16 to 256 values
    down = min(-(-blocks_at_a_time // across), -(-rows_per_thread // 16))
    down = max(down, -(-rows_per_thread // 256))
    return 4 * columns * vector * width * down if down > 1 else 0  # global_memory_size


def _power_of_two(number: int) -> int:
    """The largest up to `number`."""
    return 1 << (number.bit_length() - 1)
