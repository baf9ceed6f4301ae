"""Weights of a model read on demand, and what all folders of safetensors share."""

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.extra import Base
from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.checkpoint.pretrained.weight_files import WeightFiles
from launcher.model.config import ModelConfig
from launcher.parallel.places import Places
from launcher.strategies.flat_shards import Shard
from launcher.strategies.parameters import parameter_shapes
from launcher.util.errors import UserError
from launcher.util.processes import usable_cores

_THREADS = 16


class Stored(ABC):
    """Weights of a model under our parameter names, read on demand."""

    config: ModelConfig
    checkpoint: Checkpoint | None = None
    """The checkpoint that holds them, or the adapters among them, if any."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape of our parameters, in their order."""

    def has(self, name: str) -> bool:
        """Return whether there is such a parameter."""
        return name in self.shapes

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return our parameter `name` in its shape and stored type.

        Raises:
            UserError: there are values that are NaN or infinite.
        """

    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, of any type on any device, with its range."""
        places = shard.places
        indices = places.place(torch.arange(places.numel))
        shard.data.copy_(self.read(shard.name).flatten()[indices])

    @abstractmethod
    def base(self) -> Base:
        """Return the identity that a run with adapters beside them records."""


class FolderWeights(Stored, contextlib.ExitStack):
    """The parameters of a model in a folder of safetensors, open in a `with` block.

    Weights are read on demand, and stay valid behind it; a subclass checks names, shapes and types
    on opening.

    Raises:
        UserError: files are missing or damaged, or do not fit the model.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__()
        self.folder, self.config = folder, config
        self.shapes = dict(parameter_shapes(config))
        self._weights = self.enter_context(WeightFiles(folder))
        self._match()  # after an error nothing refers to the files any more, which closes them

    def base(self) -> Base:
        digest, paths = hashlib.sha256(), self._weights.paths
        # Several at once: other ranks wait, and one core takes minutes for 100 GB.
        with ThreadPoolExecutor(min(_THREADS, usable_cores())) as pool:
            for path, own in zip(paths, pool.map(_digest_of, paths), strict=True):
                digest.update(path.name.encode())
                digest.update(own)
        return Base(path=str(self.folder.absolute()), fingerprint=digest.hexdigest())

    def read_into(self, shard: Shard) -> None:
        places, start = shard.places, shard.start
        if places.contiguous:
            shard.data.copy_(self.read_range(shard.name, start, places.stop))
            return
        # Gaps are read, too: a few runs at a time, so that it takes little memory.
        runs = max(1, CHUNK_ELEMENTS // places.pitch)
        for part in shard.data.split(runs * places.run):
            stop = Places.of(start, len(part), places.run, places.pitch).stop
            whole = self.read_range(shard.name, start, stop)
            part.view(-1, places.run).copy_(whole.unfold(0, places.run, places.pitch))
            start += runs * places.pitch

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of our flattened parameter `name`, as a copy in fp32.

        Raises:
            UserError: there are values that are NaN or infinite.
        """

    @abstractmethod
    def _match(self) -> None:
        """Find the stored tensors of each parameter, and check that none is left over."""


def check_tied(folder: Path, named: tuple[str, str], here: Tensor, there: Tensor) -> None:
    """Check that two tensors in a folder, of these names, are the one that config.json says.

    Raises:
        UserError: they differ.
    """
    if not torch.equal(here, there):
        raise UserError(
            f"{folder}: {named[0]} differs from {named[1]}, but config.json says that they are "
            'tied; set "tie_word_embeddings": false there'
        )


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def finite(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor whose values can be computed with; `name` is for the message.

    Raises:
        UserError: there are values that are NaN or infinite.
    """
    rows = max(1, CHUNK_ELEMENTS * len(tensor) // tensor.numel())
    if not all(piece.isfinite().all() for piece in torch.split(tensor, rows)):
        raise UserError(
            f"{name}: has values that are NaN or infinite, so nothing can be computed with this "
            "model; fetch it again, or take a checkpoint from before it diverged"
        )
    return tensor
