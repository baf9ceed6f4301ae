"""Locate an allocation by the stack that a snapshot keeps with it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

BEFORE: Final = "before the recording"
OTHER: Final = "other"
PHASES: Final = ("forward", "backward", "optimizer step", OTHER, BEFORE)
_LIBRARY: Final = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen|^torch/|/torch/")
_OPTIMIZER: Final = re.compile(r"/torch/optim/|/bitsandbytes/optim/|/deepspeed/ops/adam/")
_CPLUSPLUS_BACKWARD: Final = re.compile(r"torch::autograd::.*(Engine|Node)|_engine_run_backward")


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where an allocation was made."""

    phase: str
    """One of `PHASES`."""
    module: str
    """Innermost `forward` of a module, as `file:line`; empty if none is on the stack."""
    line: str
    """Innermost line outside libraries, as `file:line function`; empty without a stack."""

    @property
    def label(self) -> str:
        """The most telling of these."""
        return self.module or self.line or "no stack was recorded"


UNKNOWN: Final = Origin(OTHER, "", "")
EARLIER: Final = Origin(BEFORE, "", "")


def origin_of(entry: Mapping[str, Any], known: dict[int, Origin]) -> Origin:
    """Return the origin of an event or block.

    Args:
        known: origins by stack, added to: a snapshot shares one list of frames among many
            allocations.
    """
    frames = entry.get("frames")
    named = entry.get("user_metadata")
    if not isinstance(frames, list) or not frames:
        return Origin(OTHER, str(named), "") if named else UNKNOWN
    origin = known.get(id(frames))
    if origin is None:
        origin = known[id(frames)] = _origin(frames)
    return Origin(origin.phase, str(named), origin.line) if named else origin


def _origin(frames: Sequence[Mapping[str, Any]]) -> Origin:
    """Read a stack, innermost frame first."""
    phase, module, line = OTHER, "", ""
    for frame in frames:
        if not isinstance(frame, dict):
            continue  # damaged
        file, function = str(frame.get("filename", "")), str(frame.get("name", ""))
        where = f"{PurePosixPath(file).name}:{frame.get('line', 0)}"
        own = not _LIBRARY.search(file) and file.endswith(".py")
        if own and not line:
            line = f"{where} {function}"
        if phase == OTHER:
            phase = _phase(file, function)
        # A library's module is telling, too: modeling_llama.py. torch's own are not.
        if not module and function == "forward" and "/torch/" not in file:
            module = f"{where} forward"
    return Origin(phase, module, line)


def _phase(file: str, function: str) -> str:
    if _OPTIMIZER.search(file):
        return "optimizer step"
    if function in ("backward", "_engine_run_backward") and "/torch/" in file:
        return "backward"
    if _CPLUSPLUS_BACKWARD.search(function):
        return "backward"
    # A module's call: what is innermost decides, so that recomputation counts as forward.
    if function in ("_call_impl", "_wrapped_call_impl"):
        return "forward"
    return OTHER
