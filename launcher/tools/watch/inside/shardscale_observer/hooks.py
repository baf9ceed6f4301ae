"""Put the observer's hooks into torch, once, right after its import."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from shardscale_observer.compiled import COMPILED
from shardscale_observer.endings import follow_endings
from shardscale_observer.errors import place_in_program
from shardscale_observer.guard import guarded
from shardscale_observer.history import History
from shardscale_observer.limit import making
from shardscale_observer.memory import Peaks
from shardscale_observer.saves import follow_saves
from shardscale_observer.scaling import follow_scaler
from shardscale_observer.session import Session
from shardscale_observer.values import Values


def install(torch: Any, settings: dict[str, Any]) -> None:
    """Install all hooks for this process, and for those that it forks."""
    guarded(attach(torch, settings).hook_end)()


def attach(torch: Any, settings: dict[str, Any]) -> Observer:
    """Install the hooks that can be removed again, and return what removes them."""
    peaks = Peaks(torch) if hasattr(torch._C, "_cuda_memoryStats") else None
    observer = Observer(torch, settings, peaks)
    for hook in (
        *(observer.hook_modules, observer.hook_backward, observer.hook_optimizers),
        observer.hook_saves_and_data,
        observer.hook_scaler,
    ):
        guarded(hook)()
    if peaks is not None:
        # once the program initialises CUDA: a context made here would break its forks
        torch.cuda._lazy_call(guarded(observer.cuda_begins))
    os.register_at_fork(after_in_child=observer.forked)
    return observer


class Observer:
    """The hooks of this process and the session that they report to."""

    def __init__(self, torch: Any, settings: dict[str, Any], peaks: Peaks | None) -> None:
        self.torch = torch
        self.settings = settings
        self.peaks = peaks
        self.session = Session(torch, settings, peaks)
        self._removals: list[Callable[[], object]] = []

    def remove(self) -> None:
        """Take the hooks away; CUDA's, which are for good, do nothing once the session is over."""
        while self._removals:
            self._removals.pop()()
        if self.session.file is not None:
            self.session.file.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._removals.append(lambda: setattr(owner, name, before))

    def _reports(self, name: str) -> Callable[..., Any]:
        """Return a guarded call of a method of the session, which is another one after a fork."""

        def report(*args: Any) -> Any:
            return getattr(self.session, name)(*args)

        report.__name__ = name  # a fault is noted by it
        return guarded(report)

    def forked(self) -> None:
        """Begin anew in a forked process: it may become a rank, or load data."""
        self.session = Session(self.torch, self.settings, self.peaks)

    def is_real(self) -> bool:
        """Return False while torch traces: then tensors are not the program's."""
        torch = self.torch
        if torch.compiler.is_compiling():
            return False
        if not torch._C._len_torch_dispatch_stack():
            return True
        # Modes of the program's own, such as a counter of FLOPs, are no tracing.
        mode, key = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
        return not any(map(mode, (key.FAKE, key.PROXY, key.FUNCTIONAL)))

    def hook_modules(self) -> None:
        """Follow the outermost module's forward, and in recorded steps every module's.

        Not by torch's global hooks: with those torch.compile traces another way into each module,
        which fails for some programs.
        """
        compiling = self.torch.compiler.is_compiling
        call = self.torch.nn.Module.__call__
        observer = self

        @functools.wraps(call)
        def call_module(self: Any, *args: Any, **kwargs: Any) -> Any:
            # torch.profiler looks in this frame for the module, by the name `self`
            if compiling():
                return call(self, *args, **kwargs)
            modules = observer.session.modules
            depth = len(modules)
            modules.append(self)
            if not depth or observer.session.recording:
                enters(self, args, kwargs)
            try:
                return call(self, *args, **kwargs)
            finally:
                modules = observer.session.modules  # another list after a fork
                del modules[depth:]
                if not modules or observer.session.recording:
                    leaves()

        @guarded
        def enters(module: Any, args: Any, kwargs: Any) -> None:
            if not self.is_real():
                return
            if len(self.session.modules) == 1:
                self.session.root_begins(module, args, kwargs)
            self.session.mark_module()

        @guarded
        def leaves() -> None:
            if not self.is_real():
                return
            modules = self.session.modules
            self.session.mark_module()
            if not modules:
                self.session.root_ends()

        self._replace(self.torch.nn.Module, "__call__", call_module)

    def hook_backward(self) -> None:
        """Follow every way into autograd's engine."""
        autograd = self.torch.autograd
        run = autograd._engine_run_backward

        @guarded
        def begins(outputs: Any, accumulate_grad: bool) -> bool:
            if not self.is_real() or any("Fake" in type(one).__name__ for one in outputs):
                return False
            self.session.backward_begins(outputs if accumulate_grad else ())  # grad() has no loss
            return True

        ends = self._reports("backward_ends")

        @functools.wraps(run)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            began = begins(outputs, kwargs.get("accumulate_grad", True))
            try:
                return run(outputs, *args, **kwargs)
            finally:
                if began:
                    ends()

        self._replace(autograd, "_engine_run_backward", run_backward)

    def hook_optimizers(self) -> None:
        """Follow every optimizer's step, and a closure that computes its gradients (Lightning)."""
        compiling = self.torch.compiler.is_compiling
        begins, ends = self._reports("optimizer_begins"), self._reports("optimizer_ends")
        closure_begins = self._reports("closure_begins")

        def followed(closure: Any, optimizer: Any) -> Any:
            @functools.wraps(closure)
            def call(*args: Any, **kwargs: Any) -> Any:
                closure_begins()
                try:
                    return closure(*args, **kwargs)
                finally:
                    begins(optimizer)

            return call

        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if compiling():
                COMPILED.optimizer = optimizer
                return None
            own, *given = args  # the optimizer, then perhaps a closure
            if given and callable(given[0]):
                return (own, followed(given[0], optimizer), *given[1:]), kwargs
            if callable(closure := kwargs.get("closure")):
                return args, {**kwargs, "closure": followed(closure, optimizer)}
            begins(optimizer)
            return None

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not compiling():
                ends()

        optimizers = importlib.import_module("torch.optim.optimizer")
        if self.settings["mode"] == "rehearse":
            made = making(optimizers.Optimizer.__init__, self._reports("optimizer_made"))
            self._replace(optimizers.Optimizer, "__init__", made)
        self._removals.append(optimizers.register_optimizer_step_pre_hook(before).remove)
        self._removals.append(optimizers.register_optimizer_step_post_hook(after).remove)

    def hook_saves_and_data(self) -> None:
        """Follow what saves, and the waits for batches of torch's own loader."""
        torch = self.torch
        save = self._within("checkpoint", torch.save)
        self._replace(torch, "save", save)
        self._replace(torch.serialization, "save", save)
        follow_saves(self._within)
        loader: Any = importlib.import_module("torch.utils.data.dataloader")
        iterator = loader._BaseDataLoaderIter
        self._replace(iterator, "__next__", self._within("data", iterator.__next__))

    def hook_scaler(self) -> None:
        """Follow losses that are scaled for fp16; a rehearsal reads none."""
        if self.settings["mode"] != "rehearse":
            follow_scaler(self.torch, self._replace)

    def _within(self, phase: str, function: Any, *, timed_only: bool = False) -> Any:
        @guarded
        def begins() -> str | None:
            on_main = threading.current_thread() is threading.main_thread()
            if not on_main or (timed_only and self.session.timeline is None):
                return None
            return self.session.apart_begins(phase)

        ends = self._reports("apart_ends")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = begins()
            try:
                return function(*args, **kwargs)
            finally:
                if before is not None:
                    ends(before)

        return call

    def cuda_begins(self) -> None:
        """CUDA has just been initialised by the program."""
        if self.session.closed:
            return
        device = self.torch.cuda.current_device()
        if self.session.rehearses and self.peaks is not None:
            wanted = bool(self.settings.get("snapshot"))
            self.session.history = History(
                self.torch, self.peaks, device, snapshot=wanted, first=True
            )
            self.session.history.start()
            values = Values(self.torch, self.settings.get("answers", {}), self.session.waits)
            values.install()
            self.session.values = values
        self.hook_empty_cache()
        self.hook_graphs()

        @guarded
        def out_of_memory(device: int, wanted: int, total: int, free: int) -> None:
            # No local holds a frame: this one's would be a cycle, and keep all callers' tensors.
            place = place_in_program(sys._current_frames()[threading.main_thread().ident or 0])
            self.session.out_of_memory(
                requested_bytes=wanted, free_bytes=free, total_bytes=total, place=place
            )

        self.torch._C._cuda_attach_out_of_memory_observer(out_of_memory)

    def hook_empty_cache(self) -> None:
        """Mark where the program gives cached memory back to the device."""
        empty = self.torch._C._cuda_emptyCache

        mark = self._reports("mark")

        def empty_cache() -> None:
            mark("empty_cache")
            empty()

        self.torch._C._cuda_emptyCache = empty_cache

    def hook_graphs(self) -> None:
        """Follow the replays of CUDA graphs."""
        replay, begins = self.torch.cuda.CUDAGraph.replay, self._reports("replay_begins")

        def call(one: Any) -> None:
            begins()
            replay(one)

        self.torch.cuda.CUDAGraph.replay = call

    def hook_end(self) -> None:
        """Follow the ways in which a process ends."""
        follow_endings(self._reports("fails"), self._reports("program_ends"))
