"""Run the real model without memory; record each allocation and free."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from launcher.forecast.trace.compiled import compiled
from launcher.forecast.trace.counting import WorkCounter, counting
from launcher.forecast.trace.events import (
    AllocationId,
    Compute,
    Lifetime,
    Module,
    Place,
    Trace,
    TraceRequest,
    Tuned,
    WorkspaceBytes,
)
from launcher.forecast.trace.foreign import fake_experts
from launcher.forecast.trace.fp8 import round_linears
from launcher.forecast.trace.gathering import mark_modules, stage3_linears
from launcher.forecast.trace.kernels import gpu_kernels, layer_norm
from launcher.forecast.trace.repeats import few_repeats
from launcher.forecast.trace.sends import recorded_groups
from launcher.forecast.trace.trainers import as_other_trainers
from launcher.forecast.trace.workspaces import workspaces
from launcher.measure.live_trace import LiveStorage, LiveTrace
from launcher.model.build import prepare
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.parts import parts_of
from launcher.parallel.model_parallel import ModelParallel
from launcher.strategies.build_inputs import materialize_whole

_DEVICE_OF: Final = torch.ops.prim.device.default
_META: Final = torch.device("meta")


class Recorder(LiveTrace):
    """Record the allocation and the free of each storage, by segment.

    Args:
        compute: on a GPU autograd adds a gradient to an earlier one in that one's memory, as it
            does with real tensors under no dispatch mode (torch 2.13.0's
            torch/csrc/autograd/input_buffer.cpp): where grad mode is off, and the earlier one is
            dense and has no other owner. With fake tensors it never does, nor under the mode
            that measures on a CPU.
    """

    def __init__(self, compute: Compute, workspace_bytes: WorkspaceBytes) -> None:
        # Hooks on all modules would have compiled blocks compiled anew.
        super().__init__(names_modules=False)
        self._on_gpu = compute.device_type == "cuda"
        self._workspace_bytes = workspace_bytes
        # (earlier gradient, sum) of the last addition, until the next allocation or free
        self._just_added: tuple[LiveStorage, LiveStorage] | None = None
        self.work = WorkCounter()
        self.place = self.work.place
        self.first_compiled: tuple[Place, ...] = ()
        self.unlike: set[tuple[int, int]] = set()
        self.gradients: list[tuple[str, AllocationId, Place, int]] = []
        self.marks: list[tuple[Module | Tuned, Place, int]] = []
        self._allocations: dict[LiveStorage, tuple[AllocationId, int, int]] = {}
        # The next event's number, and the next storage's, in each segment.
        self._ticks: dict[Place, Iterator[int]] = defaultdict(itertools.count)
        self._numbers: dict[Place, Iterator[int]] = defaultdict(itertools.count)
        self._ends: dict[LiveStorage, tuple[Place, int]] = {}
        self._known: set[LiveStorage] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compile under this mode, and follow what compiled code does only."""
        return True

    def enter(self, place: Place) -> None:
        """Start a segment."""
        self.place = self.work.place = place

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Take note of what is there already, and would be seen first through a view."""
        for tensor in tensors:
            self._see(tensor)
        # they were not allocated within the trace
        self._allocations.clear()
        self._ticks.clear()
        self._numbers.clear()
        self._known = set(self._live.values())

    def gradient(self, name: str, parameter: Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        assert parameter.grad is not None
        allocation = self._allocations[self._live[parameter.grad.untyped_storage()._cdata]][0]
        self.gradients.append((name, allocation, self.place, self._tick()))

    def module(self, name: str, entering: bool, forward: bool) -> None:
        """A module is entered or left."""
        self.marks.append((Module(name, entering, forward), self.place, self._tick()))

    def take(self, func: Any, args: Sequence[Any]) -> None:
        """An operator takes memory on a GPU for as long as it runs."""
        if self._on_gpu:
            for workspace in workspaces(func, args, self._workspace_bytes):
                self._see(workspace)

    def tuned(self, copied_bytes: int, unlike: Sequence[tuple[int, int]]) -> None:
        """A compiled kernel has what it reads and writes."""
        self.unlike.update(unlike)
        if self.place in self.first_compiled:
            self.marks.append((Tuned(copied_bytes), self.place, self._tick()))

    def lifetimes(self) -> list[Lifetime]:
        """Return all storages allocated so far."""
        found = []
        for live, (allocation, at, size_bytes) in self._allocations.items():
            place = allocation[0]
            end = self._ends.get(live)
            # saved: allocated forwards and freed backwards, or not at all
            outlives = end is None or end[0].part.endswith("backward")
            saved = outlives and not place.part.endswith("backward")
            found.append(Lifetime(allocation, size_bytes, saved, at, end))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # autograd asks for it more often than for all else
            fake = args[0]
            # as FakeTensor answers in its own dispatch
            return _META if fake.fake_mode.in_kernel_invocation else fake.fake_device
        if self._on_gpu and func is torch.ops.aten.native_layer_norm.default:
            out = self._ran(layer_norm, args, kwargs)
        else:
            # Torch wraps what is called __torch_dispatch__, which takes its time once only.
            out = self._ran(func, args, kwargs)
        self.work.operator(func, args, kwargs, out)
        if self._on_gpu:
            self.take(func, args)
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                self._add(args[0], out)
        return out

    def _add(self, earlier: Tensor, total: Tensor) -> None:
        dense = torch.ops.aten.is_non_overlapping_and_dense(earlier)
        if dense and not earlier._is_view():  # else another tensor has that storage, too
            keys = earlier.untyped_storage()._cdata, total.untyped_storage()._cdata
            self._just_added = self._live[keys[0]], self._live[keys[1]]

    def _change(self, live: LiveStorage, change: int) -> None:
        super()._change(live, change)
        added, self._just_added = self._just_added, None
        if live in self._known:
            return
        if added is not None and live is added[0]:
            # Freed at once, so that it had no other owner: the sum took its place.
            self._allocations[added[1]] = self._allocations.pop(live)
            return
        if live not in self._allocations:
            allocation = (self.place, next(self._numbers[self.place]))
            self._allocations[live] = (allocation, self._tick(), change)
        else:
            self._ends[live] = (self.place, self._tick())

    def _tick(self) -> int:
        return next(self._ticks[self.place])


def record_trace(
    asked: TraceRequest, workspace_bytes: WorkspaceBytes, *, passed_rows: int | None = None
) -> Trace:
    """Run forward and backward on fake tensors.

    On fake CPU tensors whatever the device: they need no driver, autograd works, and SDPA takes
    its fused kernel, where fake CUDA tensors would take the one that holds all scores. What a GPU's
    kernels keep instead is in `launcher.forecast.trace.kernels`.

    Args:
        passed_rows: rows between the second MLP tile and the last but one, which are allocated
            and not computed; None for those of so many tiles, 0 to compute all.
    """
    model, compute, micro_batch, seq_len, rank = asked
    recorder = Recorder(compute, workspace_bytes)
    model_parallel = recorded_groups(rank, compute, recorder.work)
    on_gpu = gpu_kernels(model, compute, recorder.work)
    kernels = contextlib.nullcontext(model) if compute.device_type == "cpu" else on_gpu
    with FakeTensorMode() as fake, kernels as traced:
        module = _fake_decoder(model_parallel, traced, compute, fake)
        _follow(module, recorder)  # a segment begins behind what a module says of its end
        if compute.stage3:
            mark_modules(module, recorder.module)
        # To a GPU's own kernel documents are no T x T mask.
        masks = compute.documents and traced.attention == model.attention
        count = 3 if masks else 2  # tokens, targets, starts
        inputs = [torch.zeros(micro_batch, seq_len, dtype=torch.int64) for _ in range(count)]
        with contextlib.ExitStack() as around:
            computed = torch.bfloat16 if compute.autocast else compute.params_dtype
            around.enter_context(fake_experts(model, computed))
            around.enter_context(as_other_trainers(model, module))
            if compute.stage3:
                around.enter_context(stage3_linears())
            if compute.compiled:
                blocks = list(parts_of(module).blocks)
                around.enter_context(compiled(blocks, recorder, compute.kept_share))
            if compute.device_type != "cpu":  # a CPU's kernels are not tuned
                # blocks share compiled code: the first to run, either way, tunes the kernels
                last = Place("block_backward", model.layers - 1)
                recorder.first_compiled = (Place("block"), last)
            around.enter_context(few_repeats(recorder.work, passed_rows))
            around.enter_context(counting(recorder.work))
            around.enter_context(recorder)
            recorder.know([*module.parameters(), *module.buffers(), *inputs])
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute.autocast):
                loss = module(*inputs)
            recorder.enter(Place("head_backward"))
            (loss * 1.0).backward()  # times 1 / accumulation in an engine: one more storage
        lifetimes = recorder.lifetimes()
    work = recorder.work
    return Trace(
        *(model.layers, lifetimes, recorder.gradients, recorder.marks),
        *(dict(work.works), work.chunks, frozenset(recorder.unlike)),
    )


def _fake_decoder(
    model_parallel: ModelParallel, model: ModelConfig, compute: Compute, fake: FakeTensorMode
) -> nn.Module:
    # Constructors of transformers make tensors of numbers, which fake ones cannot be moved from.
    foreign = isinstance(model, ForeignConfig)
    modes = unset_fake_temporarily() if foreign else contextlib.nullcontext()
    with modes, torch.device("meta"):
        prepare(model)
        module = model_parallel.decoder(model)
    materialize_whole(
        module,
        lambda name, shape: torch.empty(shape),
        device=torch.device("cpu"),
        dtype=compute.params_dtype,
        frozen_dtype=compute.frozen_dtype,
    )
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else fake.from_tensor(buffer)
    if compute.fp8:
        round_linears(module, torch.bfloat16, in_graphs=compute.compiled)
    return module


def _follow(module: nn.Module, recorder: Recorder) -> None:
    """Tell the recorder which segment is running and when gradients are whole."""
    parts = parts_of(module)
    blocks = list(parts.blocks)

    def enter(layer: int, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if recorder.place.part.endswith("backward"):
            return  # recomputed
        recorder.enter(Place("block", layer))
        # The gradient of a block's input is the last result of its backward: what follows belongs
        # to the block before.
        before = Place("block_backward", layer - 1) if layer else Place("embed_backward")
        _mark_backward(inputs[0], recorder, before)

    def enter_head(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorder.enter(Place("head"))
        _mark_backward(inputs[0], recorder, Place("block_backward", len(blocks) - 1))

    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(enter, layer))
    final_norm = next(iter(parts.head.values()))
    final_norm.register_forward_pre_hook(enter_head)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(recorder.gradient, name))


def _mark_backward(tensor: Tensor, recorder: Recorder, place: Place) -> None:
    def arrived(gradient: Tensor) -> None:
        recorder.enter(place)

    if tensor.requires_grad:  # not under the first adapters
        tensor.register_hook(arrived)
