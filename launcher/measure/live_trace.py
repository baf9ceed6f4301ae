"""Lifetime of every tensor storage in a CPU run (`--memory-trace`).

A dispatch mode sees the outputs of each operator, and a weak reference to the storage its release.
It costs about a tenth of the step time, so it is off by default.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as wraps_others
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A live storage. `LiveTrace.claim` sets its `category`."""

    size_bytes: int
    phase: str
    module: str | None
    shape: tuple[int, ...]
    dtype: str
    category: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakContent:
    """Live bytes by category at the peak of a recorded step."""

    total_bytes: int
    phase: str
    by_category: Mapping[str, int]


@dataclass(slots=True)
class _Recording:
    start: dict[LiveStorage, int]
    start_bytes: int
    # (storage, change in bytes, phase): appended in time order.
    events: list[tuple[LiveStorage, int, str]] = field(default_factory=list)


class _ModulePath:
    """Tracks the name of the module whose forward is running, through global hooks."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def current(self) -> str | None:
        return self._stack[-1] if self._stack else None

    def follow(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
        ]

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._names:
            # Wrappers (DDP, DeepSpeed's engine) run first; the decoder inside names the others.
            self._names |= {m: name or type(m).__name__ for name, m in module.named_modules()}
        self._stack.append(self._names[module].removeprefix("module."))

    def _exit(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()


def _plain(value: Any) -> Iterator[Tensor]:
    # The tensors with storage: the value itself, a DTensor's shard, codes and scales.
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return
    wrapper: Any = value
    if wraps_others(wrapper):
        # Attributes of a wrapper that are no tensors, such as a mesh, are not listed here.
        for name in wrapper.__tensor_flatten__()[0]:
            yield from _plain(getattr(wrapper, name))
    else:
        yield value


class LiveTrace(TorchDispatchMode):
    """Counts live tensor storages; `record` and `stop` keep the events of a step up to its peak."""

    def __init__(self, *, names_modules: bool = True) -> None:
        super().__init__()
        self.current_bytes = 0
        self.phase = "build"
        self._names_modules = names_modules
        self._modules = _ModulePath()
        self._peak_bytes = 0
        self._live: dict[int, LiveStorage] = {}
        self._recording: _Recording | None = None
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "LiveTrace":
        trace = self

        # FSDP frees and regrows gathered parameters in place, bypassing the dispatcher.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = trace._resize(storage, size)
            live = trace._live.get(storage._cdata)
            if live is not None:
                trace._change(live, storage.nbytes() - live.size_bytes)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # until __exit__
        if self._names_modules:
            self._modules.follow()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # torch's again
        self._modules.leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ran(func, args, kwargs)

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            for tensor in _plain(leaf):
                self._see(tensor)
        return out

    def reset_peak(self) -> None:
        """Restart `peak_bytes` from the current bytes."""
        self._peak_bytes = self.current_bytes

    def peak_bytes(self) -> int:
        """Return the highest live bytes since the last reset."""
        return self._peak_bytes

    def claim(self, owners: Mapping[int, str]) -> None:
        """Set the category (params, grads, optimizer, buffers) of live storages, by their key."""
        for key, category in owners.items():
            live = self._live.get(key)
            if live is not None:
                live.category = category

    def mark_activations(self, gathered: Mapping[int, str]) -> None:
        """Categorize, after a forward, what it left alive as kept for the backward.

        `gathered` are the parameters as the modules see them now: those that are not held between
        steps are all-gathered copies, and count as temporary.
        """
        for key, live in self._live.items():
            if live.category is None and live.phase in ("data", "forward"):
                # An empty storage is a gathered parameter that was released.
                kept = live.size_bytes > 0 and key not in gathered
                live.category = "activations" if kept else "temporary"

    def record(self) -> None:
        """Start recording events."""
        self._recording = _Recording(
            start={live: live.size_bytes for live in self._live.values()},
            start_bytes=self.current_bytes,
        )

    def stop(self) -> PeakContent:
        """Stop recording and return the content of memory at its peak."""
        recording, self._recording = self._recording, None
        assert recording is not None
        total, highest, at, phase = recording.start_bytes, recording.start_bytes, 0, "data"
        for index, (_, change, when) in enumerate(recording.events, start=1):
            total += change
            if total > highest:
                highest, at, phase = total, index, when
        alive = recording.start
        for live, change, _ in recording.events[:at]:
            alive[live] = alive.get(live, 0) + change
        by_category: dict[str, int] = {}
        for live, size in alive.items():
            category = live.category or "temporary"
            by_category[category] = by_category.get(category, 0) + size
        return PeakContent(total_bytes=highest, phase=phase, by_category=by_category)

    def largest(self, count: int) -> list[LiveStorage]:
        """Return the largest live storages."""
        return sorted(self._live.values(), key=lambda live: -live.size_bytes)[:count]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known.size_bytes != size:
                self._change(known, size - known.size_bytes)
            return
        live = LiveStorage(
            0,
            self.phase,
            self._modules.current,
            tuple(tensor.shape),
            str(tensor.dtype).split(".")[-1],
        )
        self._live[key] = live
        # A storage's Python object lives as long as the storage itself.
        weakref.finalize(storage, self._gone, key).atexit = False
        self._change(live, size)

    def _gone(self, key: int) -> None:
        live = self._live.pop(key)
        self._change(live, -live.size_bytes)

    def _change(self, live: LiveStorage, change: int) -> None:
        live.size_bytes += change
        self.current_bytes += change
        self._peak_bytes = max(self._peak_bytes, self.current_bytes)
        if self._recording is not None:
            self._recording.events.append((live, change, self.phase))
