"""Runs the real model without memory and writes down when each storage is born and freed."""

import contextlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.memory.gathering import mark_modules, stage3_linears
from launcher.memory.live_trace import LiveStorage, LiveTrace
from launcher.memory.materialize import materialize_whole
from launcher.memory.trace_events import (
    Birth,
    Compute,
    Life,
    Module,
    Place,
    Trace,
)
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT


class Recorder(LiveTrace):
    """Keeps each storage's birth and end, by segment."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place("embed")
        self.gradients: list[tuple[str, Birth, Place, int]] = []
        self.modules: list[tuple[Module, Place, int]] = []
        self._counts: dict[Place, int] = {}
        self._births: dict[LiveStorage, tuple[Birth, int, int]] = {}
        self._numbers: dict[Place, int] = {}
        self._ends: dict[LiveStorage, tuple[Place, int]] = {}
        self._known: set[LiveStorage] = set()

    def know(self, tensors: Iterable[Tensor]) -> None:
        """What is there already, and would be seen for the first time through a view."""
        for tensor in tensors:
            self._see(tensor)
        self._births.clear()
        self._counts.clear()
        self._numbers.clear()
        self._known = set(self._live.values())

    def gradient(self, name: str, grad: Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        birth = self._births[self._live[grad.untyped_storage()._cdata]][0]
        self.gradients.append((name, birth, self.place, self._tick()))

    def module(self, name: str, entering: bool, forward: bool) -> None:
        """A module is entered or left."""
        self.modules.append((Module(name, entering, forward), self.place, self._tick()))

    def lives(self) -> dict[Birth, Life]:
        """All storages born so far."""
        found = {}
        for live, (birth, at, size_bytes) in self._births.items():
            place = birth[0]
            end = self._ends.get(live)
            outlives = end is None or end[0].part.endswith("backward")
            found[birth] = Life(
                birth=birth,
                size_bytes=size_bytes,
                module=live.module or place.part,
                shape=live.shape,
                dtype=live.dtype,
                saved=outlives and not place.part.endswith("backward"),
                at=at,
                end=end,
            )
        return found

    def _change(self, live: LiveStorage, change: int) -> None:
        super()._change(live, change)
        if live in self._known:
            return
        if live not in self._births:
            number = self._numbers.get(self.place, 0)
            self._numbers[self.place] = number + 1
            self._births[live] = ((self.place, number), self._tick(), change)
        else:
            self._ends[live] = (self.place, self._tick())

    def _tick(self) -> int:
        count = self._counts.get(self.place, 0)
        self._counts[self.place] = count + 1
        return count


@cache
def record_trace(model: ModelConfig, compute: Compute, micro_batch: int, seq_len: int) -> Trace:
    """Run forward and backward on fake tensors.

    On fake CPU tensors whatever the device: they need no driver, autograd works, and SDPA takes
    its fused kernel, where fake CUDA tensors would take the one that holds all scores.
    """
    recorder = Recorder()
    with FakeTensorMode():
        with torch.device("meta"):
            module = GPT(model)
        materialize_whole(
            module,
            lambda name, shape: torch.empty(shape),
            device=torch.device("cpu"),
            dtype=compute.params_dtype,
        )
        _follow(module, recorder)
        if compute.stage3:
            mark_modules(module, recorder.module)
        tokens = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
        targets = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
        with recorder, stage3_linears() if compute.stage3 else contextlib.nullcontext():
            recorder.know([*module.parameters(), tokens, targets])
            with _autocast(compute):
                loss = module(tokens, targets)
            recorder.place = Place("head_backward")
            (loss * 1.0).backward()
        lives = recorder.lives()
    return Trace(model.layers, lives, recorder.gradients, recorder.modules)


def _autocast(compute: Compute) -> contextlib.AbstractContextManager[Any]:
    if not compute.autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _follow(module: GPT, recorder: Recorder) -> None:
    """Tell the recorder which segment is running and when gradients are whole."""
    blocks = list(module.blocks)

    def enter(layer: int) -> Any:
        def hook(block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if recorder.place.part.endswith("backward"):
                return  # recomputed
            recorder.place = Place("block", layer)
            before = Place("block_backward", layer - 1) if layer else Place("embed_backward")
            _mark_backward(inputs[0], recorder, before)

        return hook

    def enter_head(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorder.place = Place("head")
        _mark_backward(inputs[0], recorder, Place("block_backward", len(blocks) - 1))

    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(enter(layer))
    module.ln_f.register_forward_pre_hook(enter_head)
    for name, parameter in module.named_parameters():
        _mark_gradient(name, parameter, recorder)


def _mark_gradient(name: str, parameter: nn.Parameter, recorder: Recorder) -> None:
    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.gradient(name, parameter.grad)

    parameter.register_post_accumulate_grad_hook(accumulated)


def _mark_backward(tensor: Tensor, recorder: Recorder, place: Place) -> None:
    def arrived(gradient: Tensor) -> None:
        recorder.place = place

    tensor.register_hook(arrived)
