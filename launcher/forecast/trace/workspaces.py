"""Memory that kernels of torch's CUDA build take while they run, beside what they return.

- A sum over many rows, as of a bias's gradient, has the fp32 sums of its thread blocks.
- Attention's backward has the gradient of queries in fp32 and a number for each: cuDNN's,
  FlashAttention's and the memory-efficient one. What FA2 takes more for shared key heads, and where
  heads or sequences are no multiples of its tiles, is left out.
- Softmax multiplies its output with the gradient before its backward, and where whole rows may be
  masked it looks for them afterwards (torch 2.13.0's aten/src/ATen/native/cuda/SoftMax.cu and
  transformers/attention.cpp).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from launcher.forecast.trace.events import PartialBytes

_ATEN: Final = torch.ops.aten
_MOST_INDEXED_BYTES: Final = 2**31 - 1
"""By one kernel; larger tensors are halved (TensorIterator)."""


def workspaces(func: Any, args: Sequence[Any], partial_bytes: PartialBytes) -> list[Tensor]:
    """Return tensors as large as what an operator takes on a GPU while it runs."""
    if func is _ATEN.sum.dim_IntList:
        summed, dims, *_ = args
        size_bytes = _of_sum(summed, dims, partial_bytes)
        return [torch.empty(size_bytes, dtype=torch.uint8)] if size_bytes else []
    if func is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default:
        queries = args[1]
        counts = (queries.numel(), queries.numel() // queries.size(-1))
        return [torch.empty(count, dtype=torch.float32) for count in counts]
    if func is _ATEN._softmax_backward_data.default:
        return [torch.empty(args[0].shape, dtype=args[0].dtype)]
    if func is _ATEN._safe_softmax.default:
        types = (args[0].dtype, torch.bool)  # before masked rows are 0, and where it is -inf
        return [torch.empty(args[0].shape, dtype=dtype) for dtype in types]
    return []


def _of_sum(summed: Tensor, dims: list[int], partial_bytes: PartialBytes) -> int:
    rows_only = summed.dim() > 1 and dims == [*range(summed.dim() - 1)]
    if not rows_only or not summed.is_contiguous():
        return 0
    columns = summed.size(-1)
    return partial_bytes(summed.numel() // columns, columns, summed.element_size())


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
