"""Weights of a model under our parameter names, from any folder: a model of transformers, a run or
checkpoint, or adapters beside the weights of another folder."""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.document import INDEX_NAME
from launcher.checkpoint.extra import Base, saved_model
from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.checkpoint.pretrained.foreign_weights import ForeignWeights
from launcher.checkpoint.pretrained.peft import PeftFolder, folder_beside
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.checkpoint.rank_files import RangeReader
from launcher.checkpoint.store import candidates
from launcher.config.init_from import ADAPTER_CONFIG, HF_CONFIG
from launcher.config.transformers_config import DecoderChoice, decoder_of
from launcher.model.build import initial_value
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import parameter_shapes, trained_shapes
from launcher.util.errors import UserError, naming
from launcher.util.files import FolderLock
from launcher.util.json_file import read_json


class CheckpointWeights(Stored):
    """Weights in a checkpoint."""

    checkpoint: Checkpoint

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, reader: RangeReader) -> None:
        self.checkpoint, self.config, self._reader = checkpoint, config, reader
        self.shapes = checkpoint.shapes

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        data = torch.empty(math.prod(shape))
        self._reader.read_into(Shard(name=name, kind=PARAM, start=0, data=data))
        return data.view(shape)

    def read_into(self, shard: Shard) -> None:
        self._reader.read_into(shard)

    def base(self) -> Base:
        # The index has a checksum of every piece.
        path = self.checkpoint.path.absolute()
        digest = hashlib.sha256((path / INDEX_NAME).read_bytes()).hexdigest()
        return Base(path=str(path), fingerprint=digest)


class Drawn(Stored):
    """Initial weights of a seed, which are in no file."""

    def __init__(self, config: ModelConfig, base: Base) -> None:
        assert base.seed is not None
        self.config = dataclasses.replace(config, lora=None, quantize_base="none")
        self._base, self._seed = base, base.seed
        self.shapes = parameter_shapes(self.config)
        self._device = base.fingerprint.rpartition(" ")[2]  # "seed 1337 on cuda"
        if self._device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"the weights beside these adapters are those of {base.fingerprint}, which draws "
                "other numbers than a CPU: do this where there is a GPU"
            )

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return initial_value(name, shape, self.config, seed=self._seed, device=self._device).cpu()

    def base(self) -> Base:
        return self._base


class Adapted(Stored):
    """Adapters beside the weights that they were trained with.

    Args:
        adapters: a checkpoint's, or those of a PEFT folder.
        beside: the weights.
    """

    def __init__(self, adapters: CheckpointWeights | PeftFolder, beside: Stored) -> None:
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
        """Return how further training differs from where they come from."""
        return self._adapters.notes() if isinstance(self._adapters, PeftFolder) else []

    def _of(self, name: str) -> "CheckpointWeights | PeftFolder | Stored":
        return self._adapters if self._adapters.has(name) else self._beside


@contextlib.contextmanager
def open_stored(folder: Path, by: DecoderChoice = "auto") -> Iterator[Stored]:
    """Open the weights of a folder of transformers or PEFT, a run (its newest checkpoint) or a
    checkpoint; those beside adapters are opened where they were.

    Names and shapes are checked now, values when they are read.

    Args:
        by: whose code computes a folder of transformers.

    Raises:
        UserError: there are none, they are damaged, or not those that adapters were trained with.
    """
    with contextlib.ExitStack() as opened:
        if (folder / HF_CONFIG).is_file():
            yield opened.enter_context(_open_folder(folder, by))
        elif (folder / ADAPTER_CONFIG).is_file():
            beside = opened.enter_context(open_stored(folder_beside(folder)))
            yield Adapted(opened.enter_context(PeftFolder(folder, beside.config)), beside)
        else:
            saved = opened.enter_context(_open_saved(folder))
            if saved.config.lora is None:
                yield saved
            else:
                yield Adapted(saved, opened.enter_context(_beside(saved)))


def _open_folder(folder: Path, by: DecoderChoice) -> TransformersWeights | ForeignWeights:
    with naming(f"{folder}:"):
        model = decoder_of(folder / HF_CONFIG, by, {})
    if isinstance(model, ForeignConfig):
        return ForeignWeights(folder, model)
    return TransformersWeights(folder)


@contextlib.contextmanager
def _open_saved(source: Path) -> Iterator[CheckpointWeights]:
    """Open a checkpoint, or the newest one of a run folder; reads no weights yet.

    Raises:
        UserError: there is none, it is damaged, or does not say which model it holds.
    """
    checkpoint = _newest(source)
    config = saved_model(checkpoint.extra)
    if config is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: does not say which model it holds; "
            "give one that launcher.train has saved"
        )
    checkpoint.check_model(trained_shapes(config), checkpoint.kinds, list(checkpoint.counters))
    with RangeReader(checkpoint) as reader:
        yield CheckpointWeights(checkpoint, config, reader)


def _newest(source: Path) -> Checkpoint:
    while True:
        path = candidates(source)[0]
        try:
            return Checkpoint.open(path)
        except DamagedCheckpoint:
            # A run that is alive saves a newer one and removes this one, with --keep.
            if path == source or path.exists():
                raise


def dtype_at(place: Path) -> str | None:
    """Return the dtype that config.json names in a folder of transformers, or of the weights that a
    run or checkpoint began with; None if that is not known, or not any more."""
    path = place / HF_CONFIG
    try:
        if not path.is_file():
            return dtype_of_base(_newest(place))
        config = read_json(path)
    except UserError:
        return None
    # transformers 5 writes dtype, earlier versions torch_dtype.
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def dtype_of_base(checkpoint: Checkpoint) -> str | None:
    """Return the dtype of the weights that a checkpoint's run began with; None if unknown."""
    folder = checkpoint.extra.get("config", {}).get("init_from")
    if "dtype" in checkpoint.extra or folder is None:
        return checkpoint.extra.get("dtype")
    # an older version recorded none
    return dtype_at(Path(folder)) if (Path(folder) / HF_CONFIG).is_file() else None


def check_base(checkpoint: Checkpoint, found: Base) -> None:
    """Refuse adapters that were trained beside other weights.

    Raises:
        UserError: naming both.
    """
    base = checkpoint.extra.get("base")
    if base is not None and base.fingerprint != found.fingerprint:
        where = f"those that --init-from {base.path} had" if base.path else base.fingerprint
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters that were trained beside the weights of "
            f"{where}, and these are others ({found.path or found.fingerprint}): give the same"
        )


def check_stays(base: Stored) -> None:
    """Reject a checkpoint as the base of adapters, which they do not hold, if the run that saved it
    is alive and will remove it.

    Raises:
        UserError: its run keeps only the newest checkpoints, or has saved this one by the clock.
    """
    if not isinstance(base, CheckpointWeights):
        return
    checkpoint = base.checkpoint
    keep = checkpoint.extra.get("config", {}).get("keep")
    holder = None
    with contextlib.suppress(OSError):  # a file system without locks
        holder = FolderLock(checkpoint.run_folder).holder()
    if holder is not None and (keep is not None or checkpoint.extra.get("by_clock")):
        kept = "replaces it when it saves again" if keep is None else f"keeps the newest {keep}"
        raise UserError(
            f"checkpoint {checkpoint.path}: adapters need it as long as they are used, and its run "
            f"is alive ({holder}) and {kept}: give a copy made by shardscale export, or wait for "
            "its end"
        )


@contextlib.contextmanager
def _beside(adapters: CheckpointWeights) -> Iterator[Stored]:
    checkpoint = adapters.checkpoint
    base = checkpoint.extra.get("base")
    if base is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters and does not say beside which weights; "
            "give one that launcher.train has saved"
        )
    if base.path is None:
        yield Drawn(adapters.config, base)
        return
    if not Path(base.path).exists():
        raise UserError(
            f"checkpoint {checkpoint.path}: holds adapters beside the weights in {base.path}, "
            "which are not there any more: put them back there"
        )
    by: DecoderChoice = "transformers" if isinstance(adapters.config, ForeignConfig) else "auto"
    with open_stored(Path(base.path), by) as beside:
        check_base(checkpoint, beside.base())
        yield beside
