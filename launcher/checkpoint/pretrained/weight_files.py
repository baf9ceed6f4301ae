"""Folders of weights: safetensors written one tensor at a time or read in place, and JSON."""

import contextlib
import json
import math
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.checkpoint.rank_files import safetensors_header
from launcher.config.resolve import check_run_folder
from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import sync
from launcher.util.flags import require_regular_file
from launcher.util.hub_cache import INDEX_FILE, SINGLE_FILE, fetch_weights
from launcher.util.json_file import read_json

_READABLE = ("F32", "BF16", "F16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which is renamed to `out` at the end.

    Raises:
        UserError: `out` exists or cannot be written; nothing is left of the attempt.
    """
    check_run_folder(out)
    temporary = out.parent / f".{out.name}-{secrets.token_hex(4)}"
    said = f"--out {out}: cannot be written ({WHY}); free some room or choose another place"
    try:
        with refused(OSError, said), _ending_in_order():
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn SIGTERM into an exception, as Ctrl-C is one, so that cleanup runs."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """Write the tensors of `shapes` as `dtype`; `read` fetches one when its turn comes.

    One is held at a time, and its cast one piece at a time, while the library's own writer wants
    all of them in memory at once.

    Raises:
        UserError: a value is too large for fp16.
        OSError: no room, most often.
    """
    with path.open("xb") as file:
        file.write(safetensors_header(shapes, dict.fromkeys(shapes, dtype), metadata))
        for name, shape in shapes.items():
            tensor = read(name)
            assert tensor.shape == shape
            rows = max(1, CHUNK_ELEMENTS * len(tensor) // tensor.numel())
            for part in torch.split(tensor, rows):
                cast = part.to(dtype)
                if dtype == torch.float16 and cast.isinf().any():
                    most = torch.finfo(dtype).max
                    raise UserError(f"--dtype fp16: {name} has values beyond {most:g}; use bf16")
                file.write(cast.contiguous().view(torch.uint8).numpy().data)  # NumPy has no bf16
    sync(path)


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    most_bytes: int,
) -> int:
    """`write_safetensors` as one file, or as shards of at most `most_bytes` of tensors (a larger
    tensor has its own) and an index; how many files hold weights.

    Raises:
        UserError: a value is too large for fp16.
        OSError: no room, most often.
    """
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held_bytes = total_bytes = 0
    for name, shape in shapes.items():
        size_bytes = dtype.itemsize * math.prod(shape)
        if shards[-1] and held_bytes + size_bytes > most_bytes:
            shards.append({})
            held_bytes = 0
        shards[-1][name] = shape
        held_bytes += size_bytes
        total_bytes += size_bytes
    count = len(shards)
    numbered = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = dict(zip(numbered if count > 1 else [SINGLE_FILE], shards, strict=True))
    for file, held in files.items():
        write_safetensors(folder / file, held, read, dtype=dtype, metadata=metadata)
    if count > 1:
        where = {name: file for file, held in files.items() for name in held}
        sizes = {"total_size": total_bytes}
        write_json(folder / INDEX_FILE, {"metadata": sizes, "weight_map": where})
    return count


@contextlib.contextmanager
def opened_safetensors(path: Path) -> Iterator[Any]:
    """The library's view of a file, whose tensors are read when they are asked for.

    Raises:
        UserError: no file of that format.
    """
    require_regular_file(path, what="a file of safetensors")
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as safetensors ({error}); fetch it again"
        ) from None
    with opened as file:
        yield file


class WeightFiles(contextlib.ExitStack):
    """The tensors of a folder as `save_pretrained` writes it: one file, or shards and an index.

    They are open in a `with` block. Tensors are views of the mapped files: nothing is read before
    it is used.

    Raises:
        UserError: no safetensors there, or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._files: dict[str, tuple[Path, Any]] = {}
        self.paths = _weight_files(folder)
        for path in self.paths:
            opened = self.enter_context(opened_safetensors(path))
            self._files |= dict.fromkeys(opened.keys(), (path, opened))

    def names(self) -> list[str]:
        """Return the names of all tensors in all files."""
        return list(self._files)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor has this shape, and a type whose values fp32 holds exactly.

        Raises:
            UserError: it has not.
        """
        found = list(self.without_values(name).shape)
        if found != list(shape):
            what = f"{name} is {found}, but config.json makes it {list(shape)}"
            raise of_another_config(self._files[name][0], what)

    def without_values(self, name: str) -> Tensor:
        """Return a tensor's shape, as one on the meta device.

        Raises:
            UserError: fp32 does not hold the values of its type exactly.
        """
        path, file = self._files[name]
        found = file.get_slice(name)
        if found.get_dtype() not in _READABLE:
            raise UserError(
                f"{path}: {name} is stored as {found.get_dtype()}, and only "
                f"{', '.join(_READABLE)} can be imported; save it as one of these"
            )
        return torch.empty(found.get_shape(), device="meta")

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored type."""
        tensor: Tensor = self._files[name][1].get_tensor(name)
        return tensor


def of_another_config(where: Path, what: str) -> UserError:
    """Return the refusal of weights that are not those of the config.json beside them."""
    return UserError(f"{where}: {what}; give the config.json that belongs to these weights")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Indented, for people too."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    shards = _shards(folder / INDEX_FILE) if (folder / INDEX_FILE).exists() else []
    fetch_weights(folder, shards)
    if not shards and (folder / INDEX_FILE).exists():  # the cache had lacked it, too
        shards = _shards(folder / INDEX_FILE)
        fetch_weights(folder, shards)
    if shards:
        return [folder / name for name in shards]
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


def _shards(index: Path) -> list[str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{index}: has no weight_map; fetch it again")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index}: names {name!r}, which is no safetensors file of this folder; save the "
                "model again with save_pretrained"
            )
    return names
