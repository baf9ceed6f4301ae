"""A model's weights under our names, whatever folder they are in: a model of transformers, a run or
one of its checkpoints, or adapters beside the weights of another folder."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.document import INDEX_NAME
from launcher.checkpoint.extra import Base
from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.checkpoint.pretrained.peft import PeftFolder, folder_beside
from launcher.checkpoint.pretrained.source import Source
from launcher.checkpoint.weights import Weights, open_weights
from launcher.config.init_from import ADAPTER_CONFIG, HF_CONFIG
from launcher.model.config import ModelConfig
from launcher.model.gpt import initial_value
from launcher.model.linears import dequantize, quantize
from launcher.model.parts import is_projection, projection_of, projections
from launcher.strategies.flat_shards import Shard
from launcher.strategies.parameters import parameter_shapes
from launcher.strategies.places import Places
from launcher.util.errors import UserError


class Stored(Protocol):
    """Nothing is read before it is asked for."""

    @property
    def config(self) -> ModelConfig:
        """The model that they are of."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Where they, or adapters among them, are in one of ours."""

    def read(self, name: str) -> Tensor:
        """The parameter of that name, in its shape, as it is stored."""

    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, of any type on any device, with its range.

        Raises:
            UserError: it is damaged.
        """

    def has(self, name: str) -> bool:
        """Whether there is such a parameter."""

    def base(self) -> Base:
        """What a run that trains beside these weights says of them."""


class Folder:
    """A folder of transformers, read in place."""

    checkpoint = None

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    def read(self, name: str) -> Tensor:
        return self._source.read(name).contiguous()  # some are stored the other way round

    def has(self, name: str) -> bool:
        return name in self._source.shapes

    def read_into(self, shard: Shard) -> None:
        places, start = shard.places, shard.start
        if places.contiguous:
            shard.data.copy_(self._source.read_range(shard.name, start, places.stop))
            return
        # What lies in the gaps is read, too: a few runs at a time, so that it takes little memory.
        runs = max(1, CHUNK_ELEMENTS // places.pitch)
        for part in shard.data.split(runs * places.run):
            stop = Places.of(start, len(part), places.run, places.pitch).stop
            whole = self._source.read_range(shard.name, start, stop)
            part.view(-1, places.run).copy_(whole.unfold(0, places.run, places.pitch))
            start += runs * places.pitch

    def base(self) -> Base:
        digest = hashlib.sha256()
        for path in self._source.files():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return Base(path=str(self._source.folder.absolute()), fingerprint=digest.hexdigest())


class Saved:
    """A checkpoint of whole weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.config, self.checkpoint = weights.config, weights.checkpoint

    def read(self, name: str) -> Tensor:
        return self._weights.read(name)

    def has(self, name: str) -> bool:
        return name in self.checkpoint.shapes

    def read_into(self, shard: Shard) -> None:
        self._weights.reader.read_into(shard)

    def base(self) -> Base:
        # The index has a checksum of every piece.
        path = self.checkpoint.path.absolute()
        digest = hashlib.sha256((path / INDEX_NAME).read_bytes()).hexdigest()
        return Base(path=str(path), fingerprint=digest)


class Drawn:
    """The weights that a seed gives, of which there is no file."""

    checkpoint = None

    def __init__(self, config: ModelConfig, base: Base) -> None:
        assert base.seed is not None
        self.config = dataclasses.replace(config, lora=None, quantize_base="none")
        self._base, self._seed = base, base.seed
        self._shapes = parameter_shapes(self.config)
        self._device = base.fingerprint.rpartition(" ")[2]
        if self._device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"the weights beside these adapters are those of {base.fingerprint}, which draws "
                "other numbers than a CPU: do this where there is a GPU"
            )

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return initial_value(name, shape, self.config, seed=self._seed, device=self._device).cpu()

    def has(self, name: str) -> bool:
        return name in self._shapes

    def read_into(self, shard: Shard) -> None:
        flat = self.read(shard.name).flatten()
        places = shard.places
        indices = places.place(torch.arange(places.numel))
        shard.data.copy_(flat[indices])

    def base(self) -> Base:
        return self._base


class Adapted:
    """Adapters beside the weights that they were trained with.

    Args:
        adapters: a checkpoint's, or those of a PEFT folder.
        beside: the weights.
    """

    def __init__(self, adapters: Saved | PeftFolder, beside: Stored) -> None:
        self._adapters, self._beside = adapters, beside
        self.config, self.checkpoint = adapters.config, adapters.checkpoint

    def read(self, name: str) -> Tensor:
        return self._of(name).read(name)

    def has(self, name: str) -> bool:
        return self._adapters.has(name) or self._beside.has(name)

    def read_into(self, shard: Shard) -> None:
        self._of(shard.name).read_into(shard)

    def base(self) -> Base:
        return self._beside.base()

    def notes(self) -> list[str]:
        """How training them on differs from where they come from."""
        return self._adapters.notes() if isinstance(self._adapters, PeftFolder) else []

    def _of(self, name: str) -> "Saved | PeftFolder | Stored":
        return self._adapters if self._adapters.has(name) else self._beside


@contextlib.contextmanager
def open_stored(folder: Path) -> Iterator[Stored]:
    """The weights in a folder of transformers or PEFT, in a run (its newest checkpoint) or a
    checkpoint; those beside adapters are found where they were.

    Their names and shapes are checked, their values not before they are read.

    Raises:
        UserError: there are none, they are damaged, or not those that adapters were trained with.
    """
    with contextlib.ExitStack() as opened:
        if (folder / HF_CONFIG).is_file():
            yield Folder(opened.enter_context(Source(folder)))
        elif (folder / ADAPTER_CONFIG).is_file():
            beside = opened.enter_context(open_stored(folder_beside(folder)))
            yield Adapted(opened.enter_context(PeftFolder(folder, beside.config)), beside)
        else:
            weights = opened.enter_context(open_weights(folder))
            saved = Saved(weights)
            if saved.config.lora is None:
                yield saved
            else:
                yield Adapted(saved, opened.enter_context(_beside(weights)))


def check_base(checkpoint: Checkpoint, found: Base) -> None:
    """A checkpoint of adapters was trained beside these weights.

    Raises:
        UserError: beside others.
    """
    base = checkpoint.extra.get("base")
    if base is not None and base.fingerprint != found.fingerprint:
        where = f"those that --init-from {base.path} had" if base.path else base.fingerprint
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters that were trained beside the weights of "
            f"{where}, and these are others ({found.path or found.fingerprint}): give the same"
        )


@contextlib.contextmanager
def _beside(weights: Weights) -> Iterator[Stored]:
    checkpoint = weights.checkpoint
    base = checkpoint.extra.get("base")
    if base is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters and does not say beside which weights; "
            "give one that launcher.train has saved"
        )
    if base.path is None:
        yield Drawn(weights.config, base)
        return
    if not Path(base.path).exists():
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters beside the weights in {base.path}, "
            "which are not there any more: put them back there"
        )
    with open_stored(Path(base.path)) as beside:
        check_base(checkpoint, beside.base())
        yield beside


class Merged:
    """The same function as plain weights: each adapter's product is added to its weight."""

    def __init__(self, model: Stored) -> None:
        assert model.config.lora is not None
        self._model, self._lora = model, model.config.lora
        self._quantized = model.config.quantize_base
        self.config = dataclasses.replace(model.config, lora=None, quantize_base="none")
        self.checkpoint = model.checkpoint

    def read(self, name: str) -> Tensor:
        """A parameter of the plain model."""
        weight = self._model.read(name)
        module = name.removesuffix(".weight")
        if self._quantized != "none" and is_projection(name):  # what the adapters were trained with
            packed = quantize(weight.float(), self._quantized)
            weight = dequantize(packed, weight.size(1), self._quantized, torch.float32)
        if not self._model.has(f"{module}.lora_a"):
            return weight
        a, b = (self._model.read(f"{module}.lora_{part}").float() for part in "ab")
        projection = projection_of(module)
        assert projection is not None
        sizes = projections(self.config)[projection].sizes
        blocks = torch.block_diag(*b.split(list(sizes)))
        return torch.addmm(weight.float(), blocks, a, alpha=self._lora.scale)
