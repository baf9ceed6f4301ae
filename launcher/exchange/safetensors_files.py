"""safetensors, written one tensor at a time; and a folder of them, read in place."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.errors import UserError
from launcher.strategies.flat_shards import element_count

SINGLE_FILE = "model.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_READABLE = ("F32", "BF16", "F16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor that is going to be written; `read` fetches it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_safetensors(
    path: Path, tensors: Sequence[Stored], *, dtype: torch.dtype, metadata: Mapping[str, str]
) -> None:
    """Write `tensors` as `dtype`, holding one at a time, and its cast one piece at a time.

    The library's own writer wants all of them in memory at once.

    Raises:
        OSError: no room, most often.
    """
    with path.open("xb") as file:
        file.write(_header(tensors, dtype, metadata))
        for stored in tensors:
            tensor = stored.read()
            assert tensor.shape == stored.shape
            rows = max(1, CHUNK_ELEMENTS * len(tensor) // tensor.numel())
            for part in torch.split(tensor, rows):
                file.write(part.to(dtype).contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Iterable[Stored], dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for stored in tensors:
        end = begin + dtype.itemsize * element_count(stored.shape)
        entries[stored.name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": stored.shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data behind it is aligned
    return len(text).to_bytes(8, "little") + text


class Weights:
    """The tensors of a folder as `save_pretrained` writes it: one file, or shards and an index.

    Tensors are views of the mapped files: nothing is read before it is used.

    Raises:
        UserError: no safetensors there, or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}
        with contextlib.ExitStack() as opening:
            for path in _weight_files(folder):
                try:
                    opened = opening.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise UserError(
                        f"{path}: cannot be read as safetensors ({error}); fetch it again"
                    ) from None
                self._files |= dict.fromkeys(opened.keys(), (path, opened))
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        """All tensors, whichever file they are in."""
        return list(self._files)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """The tensor has this shape, and a type whose values fp32 holds exactly.

        Raises:
            UserError: it has not.
        """
        path, file = self._files[name]
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise UserError(
                f"{path}: {name} is {found.get_shape()}, but config.json makes it {list(shape)}; "
                "give the config.json that belongs to these weights"
            )
        if found.get_dtype() not in _READABLE:
            raise UserError(
                f"{path}: {name} is stored as {found.get_dtype()}, and only "
                f"{', '.join(_READABLE)} can be imported; save it as one of these"
            )

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        tensor: Tensor = self._files[name][1].get_tensor(name)
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a folder that transformers' "
            "save_pretrained has written"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not valid JSON; fetch it again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds no JSON object; fetch it again")
    return document


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        shards = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{folder / INDEX_FILE}: has no weight_map; fetch it again")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(
                    f"{folder / INDEX_FILE}: names {name!r}, which is no safetensors file of this "
                    "folder; save the model again with save_pretrained"
                )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    pickles = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{pickles[0]}: is a pickle, which runs whatever code is in it when it is read; save "
            "the model as safetensors (save_pretrained in a current transformers does)"
        )
    raise UserError(
        f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a folder that transformers' "
        "save_pretrained has written"
    )
