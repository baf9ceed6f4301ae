"""Answer reads of values that no kernel has computed, and list each place that reads one.

In a rehearsal no kernel runs, so a value on the device is known only where the host has sent it and
nothing has written there since (held.py; numbers that are not whole: nothing was launched). Every
other read is answered by a stated rule, in this order:

1. what --answer says for the line;
2. 0 or false where its source speaks of inf, nan, invalid, an overflow, or a stop;
3. true where it speaks of finite, allclose, equal or all(...), or asserts;
4. a loss is 1.0 and falls by a hundredth with each step, a score 0.5 and rises, and a count of what
   is right 1 and rises;
5. false for other booleans, 1 for integers, 1.0 for other numbers: a norm.

Of copies of more than SMALL elements masks are true, and others 0, which is not listed.

rules.py: the source is the call that reads, or its line, or its function.
"""

from __future__ import annotations

import ctypes
import functools
import linecache
import sys
import warnings
from typing import Any

from shardscale_observer.errors import is_of_program
from shardscale_observer.experts import list_of_experts, share_of_mask, tokens_of_experts
from shardscale_observer.held import held, hold, on_device
from shardscale_observer.owners import Owners
from shardscale_observer.rules import Place, after, answer, places, trend

SMALL = 64
"""Elements of a copy to the host that a program may look at; larger ones are results."""
MOST_READS = 10_000
"""Reads of one line in one step; more is a loop that waits for a value."""
NOWHERE = Place("backward", 0, "", "")
"""Autograd's threads have no frames but torch's own."""


class Values:
    """The places that have read a value, and the answers they got."""

    def __init__(self, torch: Any, answers: dict[str, Any], waits: Any) -> None:
        self._torch = torch
        self._answers = answers
        self._waits = waits
        self.places: dict[tuple[str, ...], dict[str, Any]] = {}
        self._steps = 0
        self._in_step: dict[tuple[str, ...], int] = {}
        self._counts: dict[tuple[str, ...], tuple[int, int]] = {}
        self._recall = ctypes.CDLL(None).shardscale_recall  # of the null GPU: bytes that are known
        self._recall.restype = ctypes.c_size_t
        self._library: Any = None

    def install(self) -> None:
        """Replace what reads values in torch's dispatcher."""
        torch = self._torch
        self._library = torch.library.Library("aten", "IMPL")  # undone when it is collected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            self._implement("_local_scalar_dense", self._scalar)
            self._implement("nonzero", self._nonzero)
            self._implement("_to_copy", self._copy)
            self._implement("repeat_interleave.Tensor", self._repeat_interleave)
        self._print_without_values(torch._tensor_str)

    def _print_without_values(self, module: Any) -> None:
        """Print large tensors without a read per element: libraries log their arguments."""
        to_text = module._str

        @functools.wraps(to_text)
        def text(tensor: Any, *, tensor_contents: Any = None) -> Any:
            real = "Fake" not in type(tensor).__name__
            if tensor_contents is None and real and tensor.is_cuda and tensor.numel() > SMALL:
                tensor_contents = f"no values, size={tuple(tensor.shape)}"
            return to_text(tensor, tensor_contents=tensor_contents)

        module._str = text

    def next_step(self) -> None:
        """Count reads of a line anew, and let losses fall."""
        self._steps += 1
        self._in_step.clear()

    def _implement(self, name: str, function: Any) -> None:
        try:
            self._library.impl(name, function, "CUDA", allow_override=True)
        except TypeError:  # before torch 2.8
            self._library.impl(name, function, "CUDA")

    def _scalar(self, tensor: Any) -> Any:
        if Owners.are_sought:
            return _as_type(1, tensor.dtype)
        _note_wait()
        known = self._known(tensor)
        if known is not None:
            return known.item()
        return self._answer(tensor.dtype, "item")

    def _nonzero(self, tensor: Any) -> Any:
        """Return coordinates as if every element were nonzero, the most that it can take, or those
        of one expert of a mixture or one turn of a loop, where it is not known which are."""
        _note_wait()
        count = tensor.numel()
        if count and (known := self._known(tensor)) is not None:
            return on_device(known.nonzero(), tensor.device)
        if (listed := list_of_experts(tensor)) is not None:
            self._note("nonzero", f"all {len(listed)} experts")
            return listed
        if (share := share_of_mask(tensor)) is not None:
            said = f"{share[0]} of {count} elements: {share[1]}"
            self._note("nonzero", said)
            count = share[0]
        else:
            self._note("nonzero", "all elements", count=count)
        shape = (count, tensor.dim())
        return self._torch.empty(shape, dtype=self._torch.int64, device=tensor.device)

    def _repeat_interleave(self, repeats: Any, *, output_size: Any = None) -> Any:
        """Return as many indices as the host knows that there are, else one of each."""
        if output_size is None:
            _note_wait()
            known = self._known(repeats) if repeats.numel() else None
            if known is not None:
                output_size = int(known.sum())
            else:
                output_size = self._answer(self._torch.int64, "repeats", default=repeats.numel())
        return self._torch.empty(output_size, dtype=repeats.dtype, device=repeats.device)

    def _copy(self, tensor: Any, **options: Any) -> Any:
        """Copy as torch does; hold what the device gets, and fill a small copy on the host."""
        # The kernel that all devices share is replaced for CUDA; another device still has it.
        elsewhere = self._torch._C.DispatchKeySet(self._torch._C.DispatchKey.XPU)
        copy = self._torch.ops.aten._to_copy.default.redispatch(elsewhere, tensor, **options)
        if copy.is_cuda and tensor.is_cpu:
            hold(copy, tensor)
        if not copy.is_cpu or copy.numel() == 0:
            return copy
        if (values := held(tensor)) is not None:
            return copy.copy_(values)
        known = self._known(tensor) if copy.numel() <= SMALL else None
        call = f"copy of {list(tensor.shape)}"
        if known is None and (tokens := tokens_of_experts(tensor)) is not None:
            copy.copy_(self._torch.tensor(tokens))
            self._note(call, f"{tokens[0]} to each expert")
        elif known is None and copy.numel() <= SMALL:
            copy.fill_(self._answer(tensor.dtype, call))
        elif tensor.dtype is self._torch.bool and self._known(tensor) is None:
            copy.fill_(self._answer(tensor.dtype, call, mask=True))  # as nonzero finds them
        return copy

    def _known(self, tensor: Any) -> Any:
        """Return the values on the host if they are known there, else None."""
        if (values := held(tensor)) is not None:
            return values
        if not tensor.is_contiguous():
            return None
        size = tensor.numel() * tensor.element_size()
        raw = bytearray(size)
        buffer = (ctypes.c_char * size).from_buffer(raw)
        address = ctypes.c_void_p(tensor.data_ptr())
        if self._recall(address, buffer, ctypes.c_size_t(size)) < size:
            return None
        return self._torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)

    def _answer(self, dtype: Any, call: str, *, default: Any = None, mask: bool = False) -> Any:
        frames = list(places())
        for file, line, *_ in frames:
            for place, given in self._answers.items():
                if f"{file}:{line}".endswith(f"/{place}") or f"{file}:{line}" == place:
                    value = _as_type(given, dtype)
                    self._note(call, value, frames)
                    return value
        boolean = dtype is self._torch.bool
        reader = frames[0] if frames else NOWHERE
        whole = not dtype.is_floating_point
        tends = None if boolean or default is not None else trend(reader, of_integer=whole)
        if tends is not None:
            self._note(call, after(tends, 0, of_integer=whole), frames, trend=tends)
            return after(tends, self._steps, of_integer=whole)
        value = default
        if value is None:
            value = _as_type(answer(reader, boolean=boolean, mask=mask), dtype)
        self._note(call, value, frames)
        return value

    def _note(
        self,
        call: str,
        given: Any,
        frames: list[Place] | None = None,
        *,
        count: int | None = None,
        trend: str | None = None,
    ) -> None:
        """List a read; `count` is how many elements it got, which may differ from time to time, and
        `trend` says that what is given is the first answer of all."""
        frames = frames or list(places()) or [NOWHERE]
        own = next((frame for frame in frames if is_of_program(frame.file)), None)
        place = own or frames[0]
        library = None if own == frames[0] else f"{frames[0].file}:{frames[0].line}"
        # One line may ask two things; True is equal to 1.
        key = (f"{place.file}:{place.line}", library or "", call, repr(given), trend or "")
        entry = self.places.setdefault(
            key,
            {
                "place": key[0],
                "call": call,
                "code": linecache.getline(place.file, place.line).strip(),
                "library": library,
                "times": 0,
                "answer": given,
                **({"trend": trend} if trend else {}),
            },
        )
        if count is not None:
            before = self._counts.get(key, (count, count))
            least, most = self._counts[key] = min(before[0], count), max(before[1], count)
            entry["answer"] = f"all {least if least == most else f'{least} to {most}'} elements"
        entry["times"] += 1
        self._in_step[key] = self._in_step.get(key, 0) + 1
        if self._in_step[key] == MOST_READS:
            self._waits(entry)


def _note_wait() -> None:
    """Tell the timeline, if one is written, that the host waits for the device here."""
    timeline = sys.modules.get("shardscale_rehearsal.timeline")
    if timeline is not None:
        timeline.note_wait()


def _as_type(value: Any, dtype: Any) -> Any:
    if str(dtype) == "torch.bool":
        return bool(value)
    return float(value) if dtype.is_floating_point or dtype.is_complex else int(value)
