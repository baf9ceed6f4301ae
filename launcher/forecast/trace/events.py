"""The words of a trace: segments of a micro-batch, and what happens in them.

A plan makes millions of places and events: named tuples are made and hashed fastest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from launcher.forecast.trace.work import Repeat, SegmentWork
from launcher.model.config import ModelConfig
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank
from launcher.strategies.ledger import Where

Part = Literal["embed", "block", "head", "head_backward", "block_backward", "embed_backward"]


class Place(NamedTuple):
    """A segment of the micro-batch; `layer` is 0 where it is no block."""

    part: Part
    layer: int = 0


Key = int
"""A storage of a micro-batch."""


class Allocated(NamedTuple):
    """A storage is allocated; an activation is one that the forward keeps for the backward."""

    key: Key
    size_bytes: int
    category: str
    where: Where = "device"


class Freed(NamedTuple):
    """A storage is freed."""

    key: Key


class Gradient(NamedTuple):
    """Autograd hands over a parameter's whole gradient; what becomes of it the strategy says."""

    key: Key
    parameter: str


class Module(NamedTuple):
    """A module is entered or left, forwards or backwards; only in a trace for stage 3."""

    name: str
    entering: bool
    forward: bool


class Tuned(NamedTuple):
    """A compiled kernel that is about to run for the first time, on a GPU: alternatives are timed,
    each on a copy of what it writes over."""

    copied_bytes: int


Event = Allocated | Freed | Gradient | Module | Tuned
Segment = tuple[Place, list[Event]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Segments in program order, of a model with all its layers."""

    forward: list[Segment]
    backward: list[Segment]
    left: list[Key]
    """Tensors that the backward leaves: the loss, and what its graph still holds. No gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Device and types in which the model computes: parameters as given, or fp32 under bf16
    autocast; frozen ones in a type of their own.

    `stage3` asks for the model as DeepSpeed's stage 3 runs it, `documents` for attention inside
    documents, `compiled` for compiled blocks, which keep at most `kept_share` of what they would,
    `fp8` for linears in it, `fp16` for a softmax into fp32 that converts by itself, `own_kernels`
    for ours of norms, SwiGLU and the rotary embedding on a GPU, in the place of torch's operators.
    `resident_threads` are those of the GPU, 0 of an unknown one; `heads_apart` where attention's
    backward has the gradients of shared keys for each head.
    """

    device_type: str = "cpu"
    params_dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype = torch.float32
    autocast: bool = False
    stage3: bool = False
    documents: bool = False
    resident_threads: int = 0
    heads_apart: bool = False
    compiled: bool = False
    kept_share: float = 1.0
    fp8: bool = False
    fp16: bool = False
    own_kernels: bool = True


class TraceRequest(NamedTuple):
    """A micro-batch to trace: forward and backward of [micro_batch, seq_len] tokens, local ones of
    their sequences with context parallelism, on one rank of those that compute a model."""

    model: ModelConfig
    compute: Compute
    micro_batch: int
    seq_len: int
    rank: ModelParallelRank = WHOLE_MODEL


WorkspaceOf = Literal["sum", "embedding", "shared heads"]
WorkspaceBytes = Callable[[WorkspaceOf, Sequence[int]], int]
"""(kernel, sizes of what it works on) -> bytes that a GPU takes while it runs; see
`workspace_bytes`."""
Works = dict[tuple[Place, Repeat], SegmentWork]
# A storage of a trace: the segment that allocates it, and its number among that segment's.
AllocationId = tuple[Place, int]


class Lifetime(NamedTuple):
    """Allocation of a storage and its free, if within the micro-batch, by event number."""

    allocation: AllocationId
    size_bytes: int
    saved: bool
    at: int
    end: tuple[Place, int] | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded micro-batch of a model with few layers."""

    layers: int
    lifetimes: list[Lifetime]
    gradients: list[tuple[str, AllocationId, Place, int]]
    """(parameter, storage, segment and event number of its accumulation)."""
    marks: list[tuple[Module | Tuned, Place, int]]
    works: Works
    chunks: int
    """Chunks of the loss."""
    unlike: frozenset[tuple[int, int]] = frozenset()
    """Sizes of two tensors of compiled blocks of which the first would take the second's memory if
    they were equal."""
