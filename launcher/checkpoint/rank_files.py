"""Rank files: safetensors, written and read in chunks of 4 MiB, each with a checksum."""

import json
import math
import os
import resource
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from launcher.checkpoint.document import FORMAT, damaged
from launcher.checkpoint.geometry import Range, mover
from launcher.checkpoint.index import CHUNK_ELEMENTS, Checkpoint, RankFile, element_bytes
from launcher.strategies.flat_shards import Shard
from launcher.util.files import sync
from launcher.util.processes import usable_cores

_DTYPE_NAMES = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    torch.uint8: "U8",
}
_THREADS = 8


def write_shards(path: Path, shards: Callable[[], Iterable[Shard]]) -> RankFile:
    """Write shards into one safetensors file, on disk when this returns.

    Host tensors are written from where they are; from a device one chunk at a time is copied.

    Args:
        shards: called twice, for the sizes in the header and for the data: of states in low
            precision each shard is a decoded copy, and only one of them is alive at a time.

    Raises:
        OSError: no room, or the folder is gone.
    """
    shapes: dict[str, list[int]] = {}
    types: dict[str, torch.dtype] = {}
    for shard in shards():
        if shard.data.numel() > 0:
            key = f"{shard.name}:{shard.kind}:{shard.start}"
            shapes[key], types[key] = [shard.data.numel()], _stored_type(shard.kind)
    header = safetensors_header(shapes, types, {"format": FORMAT})
    ranges: list[Range] = []
    offset_bytes = len(header)
    with path.open("xb") as file:
        file.write(header)
        for shard in shards():
            if shard.data.numel() > 0:
                ranges.append(_write_shard(file, shard, offset_bytes))
                offset_bytes += element_bytes(shard.kind) * shard.data.numel()
    sync(path)
    return RankFile(
        name=path.name,
        size_bytes=offset_bytes,
        header_bytes=len(header),
        header_checksum=zlib.crc32(header),
        ranges=ranges,
    )


def _write_shard(file: BinaryIO, shard: Shard, offset_bytes: int) -> Range:
    checksums = []
    for chunk in shard.data.split(CHUNK_ELEMENTS):
        raw = _bytes(chunk.to("cpu", _stored_type(shard.kind)))
        file.write(raw)
        checksums.append(zlib.crc32(raw))
    places = shard.places
    return Range(
        name=shard.name,
        kind=shard.kind,
        start=shard.start,
        numel=shard.data.numel(),
        offset_bytes=offset_bytes,
        checksums=checksums,
        run=None if places.contiguous else places.run,
        pitch=None if places.contiguous else places.pitch,
    )


class RangeReader:
    """Reads any piece of any tensor of a checkpoint, checking every byte that it uses."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path
        self._files = checkpoint.files
        self._found: defaultdict[tuple[str, str], list[tuple[RankFile, Range]]] = defaultdict(list)
        for file in checkpoint.files:
            for entry in file.ranges:
                self._found[entry.name, entry.kind].append((file, entry))
        self._descriptors: dict[str, int] = {}
        self._checked: set[str] = set()  # files whose header is the one that was written
        self._buffer = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, of any type on any device, with its piece.

        Raises:
            DamagedCheckpoint: the bytes are not the ones that were written.
        """
        target = shard.places
        for file, entry in self._found[shard.name, shard.kind]:
            source = entry.places
            if source.stop <= target.start or target.stop <= source.start:
                continue
            for number in range(len(entry.checksums)):
                begin = number * CHUNK_ELEMENTS
                end = min(entry.numel, begin + CHUNK_ELEMENTS)
                if (move := mover(source, begin, end, target)) is not None:
                    move(self._read(file, entry, number, self._buffer), shard.data)

    def check(self) -> None:
        """Read everything once, as fast as the disk and several threads can.

        Raises:
            DamagedCheckpoint: some bytes are not the ones that were written.
        """
        pool = ThreadPoolExecutor(min(_THREADS, usable_cores()))
        try:
            for number in range(0, len(self._files), _THREADS):
                files = self._files[number : number + _THREADS]
                for file in files:  # here, so that no thread closes what another one reads
                    self._open(file)
                ranges = [(file, entry) for file in files for entry in file.ranges]
                # Results are None: this raises the first thread's error, and cancels the rest.
                for _ in pool.map(lambda found: self._check(*found), ranges):
                    pass
        finally:
            pool.shutdown(cancel_futures=True)

    def _check(self, file: RankFile, entry: Range) -> None:
        buffer = torch.empty(min(entry.numel, CHUNK_ELEMENTS), dtype=torch.float32)
        for number in range(len(entry.checksums)):
            self._read(file, entry, number, buffer)

    def _read(self, file: RankFile, entry: Range, number: int, buffer: Tensor) -> Tensor:
        """Read chunk `number` of a range into `buffer` and check it."""
        skipped = number * CHUNK_ELEMENTS
        chunk = buffer.view(_stored_type(entry.kind))[: min(entry.numel - skipped, CHUNK_ELEMENTS)]
        offset_bytes = entry.offset_bytes + element_bytes(entry.kind) * skipped
        self._fill(file, offset_bytes, _bytes(chunk))
        if zlib.crc32(_bytes(chunk)) != entry.checksums[number]:
            what = f"holds other bytes than were written for {entry.name} ({entry.kind})"
            raise damaged(self._path, file.name, what)
        return chunk

    def _fill(self, file: RankFile, offset_bytes: int, target: memoryview) -> None:
        done = 0
        try:
            descriptor = self._open(file)
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], offset_bytes + done)
                if count == 0:
                    raise damaged(self._path, file.name, "ends too early")
                done += count
        except OSError as error:
            raise damaged(self._path, file.name, f"cannot be read ({error.strerror})") from None

    def _open(self, file: RankFile) -> int:
        if file.name in self._descriptors:
            return self._descriptors[file.name]
        # A checkpoint of a thousand ranks has more files than most processes may open.
        while len(self._descriptors) >= _most_open():
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        self._descriptors[file.name] = os.open(self._path / file.name, os.O_RDONLY)
        if file.name not in self._checked:
            # The index has the places of tensors; the header is for other readers, and checked too.
            header = bytearray(file.header_bytes)
            self._fill(file, 0, memoryview(header))
            if zlib.crc32(header) != file.header_checksum:
                raise damaged(self._path, file.name, "has another header than was written")
            self._checked.add(file.name)
        return self._descriptors[file.name]


def _most_open() -> int:
    """Return how many files to keep open: half of what the process may."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_THREADS, limit // 2) if limit != resource.RLIM_INFINITY else sys.maxsize


def _stored_type(kind: str) -> torch.dtype:
    return torch.uint8 if element_bytes(kind) == 1 else torch.float32


def safetensors_header(
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the header of a safetensors file of consecutive tensors: 8 bytes of length, then JSON,
    padded so that the data is aligned."""
    entries: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name, shape in shapes.items():
        dtype = dtypes[name]
        end = begin + dtype.itemsize * math.prod(shape)
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(chunk: Tensor) -> memoryview:
    """Return the memory of a host tensor."""
    array: np.ndarray[Any, Any] = chunk.numpy()
    return array.data.cast("B")
