"""Write down what one step asks of the device: operators, kernels, copies, messages, waits.

The library notes what reaches CUDA, in order (library/timeline.h); a dispatch mode says which
operator it is of. Prices are worked out later (launcher/tools/rehearse/seconds), outside the
program. The mode is on for one step, after those whose bytes were recorded: torch.compile compiles
nothing while it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from shardscale_observer.clock import APART
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscale_rehearsal import engines
from shardscale_rehearsal.composed import is_composite
from shardscale_rehearsal.flex_attention import flex_attention
from shardscale_rehearsal.priced import in_tf32, moved_bytes, multiplies, unpriced

PLAIN = (torch.Tensor, torch.nn.Parameter)
SCALARS = (bool, int, float, str, type(None))
_running: Timeline | None = None


class Timeline:
    """The timeline of a step of this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._mode = _Mode(self)
        self._numbers: dict[Any, int] = {}
        self._operators: list[dict[str, Any]] = []
        self._inside = threading.local()
        self._adding = threading.Lock()  # threads of DataParallel and of autograd run side by side
        self._undo: list[Any] = []
        self._left_out: set[str] = set()
        self._host_bytes = 0
        self.replays = 0
        """Replays of CUDA graphs, counted by who sees them."""

    def begin(self) -> str | None:
        """Begin; returns why not, where this program's operators cannot be followed."""
        global _running
        why: str | None = unpriced(_Mode)
        if why is not None:
            return why
        _running = self
        self._follow_triton()
        self._follow_threads()
        self._undo += engines.follow(self.hook)
        self._library.shardscale_timeline(True)
        self._mode.__enter__()
        return None

    def end(self, path: str) -> str | None:
        """Stop, and write `path`.entries and then `path`.json, which says that both are whole;
        returns why not, where the step cannot be priced.

        Raises:
            OSError: a file cannot be written.
        """
        global _running
        self._library.shardscale_timeline(False)
        _running = None
        self._mode.__exit__(None, None, None)
        for owner, name, before in self._undo:
            setattr(owner, name, before)
        if self.replays:
            return (
                f"the step replays CUDA graphs ({self.replays:,} times), whose kernels are not "
                "known by then: rehearse it without graphs for seconds"
            )
        if not self._library.shardscale_timeline_write((path + ".entries").encode()):
            raise OSError(f"{path}.entries cannot be written")
        content = {
            "operators": self._operators,
            **in_tf32(),
            "left_out": sorted(self._left_out),
            "host_bytes": self._host_bytes,
        }
        with open(path + ".json", "w", encoding="utf-8") as file:
            json.dump(content, file)
        return None

    def enters(self, phase: str, *, before: str) -> None:
        """Leave out evaluations and saves, and what lies between two of them."""
        if phase in APART:
            self._left_out.add(phase)
            self._library.shardscale_timeline_apart(True)
        elif before in APART:
            self._library.shardscale_timeline_apart(False)
        if phase in ("forward", "backward", "step"):
            self._library.shardscale_timeline_goes_on()

    def waits(self) -> None:
        """Note that the host waits for a value on the device."""
        self._library.shardscale_timeline_wait(self._stream())

    @contextlib.contextmanager
    def operator(self, key: Any, described: dict[str, Any]) -> Iterator[bool]:
        """Have what reaches the device meanwhile be this operator's; inside of another, that one's.
        `key` is equal for operators that cost the same; yield True for the first with this key."""
        if getattr(self._inside, "an_operator", False):
            yield False
            return
        with self._adding:
            number = self._numbers.setdefault(key, len(self._operators) + 1)
            first = number > len(self._operators)
            if first:
                self._operators.append(described)
        self._inside.an_operator = True
        in_hook = getattr(self._inside, "a_hook", False)
        self._library.shardscale_timeline_operator(number, self._stream(), in_hook)
        try:
            yield first
        finally:
            self._library.shardscale_timeline_operator(0, None, False)
            self._inside.an_operator = False

    @contextlib.contextmanager
    def hook(self, kind: int) -> Iterator[None]:
        """Have the host's time be that of a strategy's hook, whatever it dispatches."""
        outer = getattr(self._inside, "a_hook", False)
        if not outer:
            self._library.shardscale_timeline_hook(kind)
        self._inside.a_hook = True
        try:
            yield
        finally:
            self._inside.a_hook = outer

    def on_host(self, tensors: list[Any]) -> None:
        """Add the bytes of an operator on the host, such as an optimizer's there."""
        if not self._left_out and all(tensor.is_cpu for tensor in tensors):
            self._host_bytes += sum(tensor.nbytes for tensor in tensors)

    def _stream(self) -> Any:
        device = torch._C._cuda_getDevice()
        return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))

    def _follow_threads(self) -> None:
        """Follow the operators of threads that the step starts, as DataParallel does."""
        run = threading.Thread.run
        self._undo.append((threading.Thread, "run", run))

        def followed(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        threading.Thread.run = followed  # type: ignore[assignment, method-assign]

    def _follow_triton(self) -> None:
        """Count kernels that torch.compile has made, and those that a program has in Triton."""
        for module, owner, compiled in (
            ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", True),
            ("triton.runtime.jit", "JITFunction", False),
        ):
            if module not in sys.modules:
                continue
            kind = getattr(importlib.import_module(module), owner)
            run = kind.run
            self._undo.append((kind, "run", run))
            kind.run = self._counted(run, compiled)

    def _counted(self, run: Any, compiled: bool) -> Any:
        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if _running is not self:
                return run(kernel, *args, **kwargs)
            names = getattr(getattr(kernel, "fn", kernel), "arg_names", ())
            sizes = moved_bytes(args, kwargs, names)
            key = (compiled, id(getattr(kernel, "fn", kernel)), tuple(sizes))
            described = {
                "name": "compiled" if compiled else "triton",
                "bytes": sizes,
                "multiplies": multiplies(kernel),
                "attention": flex_attention(kernel, names, args),
            }
            with self.operator(key, described):
                return run(kernel, *args, **kwargs)

        return counted


class _Mode(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is, where torch would go back to the code before."""
        return True

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _running is None:  # a forked process, such as a loader's
            return func(*args, **kwargs)
        if any(type_ not in PLAIN for type_ in types):
            return NotImplemented  # it will call the operators of its parts
        if any(type(one) not in PLAIN for one in _tensors((args, kwargs))):
            return func(*args, **kwargs)  # of a tracer's
        if is_composite(func):  # called by a subclass, as nested tensors call aten::linear
            with self:
                return func.decompose(*args, **kwargs)
        if not func.is_view and func.name() != "aten::_to_copy":  # which may be to the device
            self._timeline.on_host(_tensors((args, kwargs)))
        ranks = _ranks(func, args)
        key = (func, _described((args, kwargs), hashable=True), ranks)
        described = {"name": f"{func._schema.name}.{func._overloadname}", "ranks": ranks}
        with self._timeline.operator(key, described) as first:
            out = func(*args, **kwargs)
        if first:
            described |= {"args": _described(args), "kwargs": _described(kwargs)}
            described["out"] = _described(out)
        return out


def _forked() -> None:
    """Follow nothing in a process that is forked meanwhile, which must not use CUDA."""
    global _running
    _running = None


os.register_at_fork(after_in_child=_forked)


def as_kernel(name: str, tensors: Any, call: Any) -> None:
    """Count kernels that no operator of torch launches, which read and write these tensors."""
    if _running is None:
        call()
        return
    sizes = [tensor.nbytes for tensor in _tensors(tensors)]
    with _running.operator((name, tuple(sizes)), {"name": name, "bytes": sizes}):
        call()


def note_wait() -> None:
    """Note that the host waits for a value, if a timeline is written."""
    if _running is not None:
        _running.waits()


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _described(value: Any, *, hashable: bool = False) -> Any:
    """Return plain values: a tensor by its shape and type; hashable, its device beside them."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype)[6:]  # without "torch."
        if hashable:
            return (tuple(value.shape), dtype, value.device.type)
        return {"shape": list(value.shape), "dtype": dtype}
    if isinstance(value, (list, tuple)):
        parts = (_described(one, hashable=hashable) for one in value)
        return tuple(parts) if hashable else list(parts)
    if isinstance(value, dict):
        found = {str(key): _described(one, hashable=hashable) for key, one in value.items()}
        return tuple(found.items()) if hashable else found
    return value if isinstance(value, SCALARS) else None


def _ranks(func: Any, args: Any) -> Any:
    """Return the ranks of a message's group; None for what is no message."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    distributed: Any = torch.distributed
    for arg in args:
        try:
            group: Any = None
            if isinstance(arg, torch.ScriptObject):
                group = distributed.ProcessGroup.unbox(arg)
            elif isinstance(arg, str) and func.namespace == "_c10d_functional":
                group = distributed.distributed_c10d._resolve_process_group(arg)
            if group is not None:
                return tuple(distributed.get_process_group_ranks(group))
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError):
            continue
    return None
