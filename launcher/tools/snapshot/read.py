"""Read a memory snapshot of torch without executing anything in it."""

import gc
import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.util.errors import UserError

Entry = Mapping[str, Any]
"""One event of the allocator, as torch writes it: action, addr, size, stream, frames."""
WITH_BYTES: Final = frozenset(
    {"alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"}
)
"""Actions that allocate or free."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numbers, which need no name to be looked up."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise UserError(
            f"the file asks for {module_name}.{global_name}: a memory snapshot holds plain values "
            "only, so this is none, or not to be trusted"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("the file refers to objects outside of it: it is no memory snapshot")


def read_snapshot(path: Path) -> dict[str, Any]:
    """Return the snapshot in a file as plain values.

    Raises:
        UserError: the file is missing, damaged, asks for a class, or is something else.
    """
    # Millions of small objects, none of them garbage.
    collects = gc.isenabled()
    gc.disable()
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(io.BufferedReader(file, 1 << 20)).load()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises what it likes
        raise UserError(
            f"{path} cannot be read as a pickle ({type(error).__name__}): give a file that "
            "torch.cuda.memory._dump_snapshot has written"
        ) from None
    finally:
        if collects:
            gc.enable()
    return _checked(path, content)


def _checked(path: Path, content: Any) -> dict[str, Any]:
    """Return the content if it has what the analysis reads."""
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise UserError(f"{path} is no memory snapshot: it has no list of segments")
    traces = content.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise UserError(f"{path}: device_traces is no list of one list per device")
    for segment in content["segments"]:
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise UserError(f"{path}: a segment has no list of blocks")
        _require(path, segment, "a segment", ("address", "total_size"), optional=("device",))
        for block in segment["blocks"]:
            _require(path, block, "a block", ("size",), optional=("address", "requested_size"))
            if not isinstance(block.get("state"), str):
                raise UserError(f"{path}: a block has no state: the file is damaged")
    for entry in (entry for trace in traces for entry in trace):
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            raise UserError(f"{path}: an event has no action: the file is damaged")
        if entry["action"] in WITH_BYTES:
            _require(path, entry, "an event", ("addr", "size"))
        elif entry["action"] == "oom":
            _require(path, entry, "an event", ("size",))
    return content


def _require(
    path: Path, value: Any, what: str, names: Sequence[str], optional: Sequence[str] = ()
) -> None:
    """Refuse a value without non-negative integers of these names."""
    for name in (*names, *optional):
        number = value.get(name, 0 if name in optional else None) if type(value) is dict else None
        if type(number) is not int or number < 0:
            raise UserError(f"{path}: {what} has no valid {name}: the file is damaged")
