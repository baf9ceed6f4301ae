"""Adapters of a PEFT folder, read as ours."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.adapters import (
    BASE_FIELD,
    DIFFERS,
    WEIGHTS_FILE,
    Projection,
    adapter_key,
    projections,
    short_name,
)
from launcher.checkpoint.pretrained.peft_settings import Settings
from launcher.checkpoint.pretrained.weight_files import opened_safetensors
from launcher.config.init_from import ADAPTER_CONFIG, HF_CONFIG, run_of
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.lora_config import PROJECTIONS, Lora
from launcher.strategies.flat_shards import Shard
from launcher.util.errors import WHY, UserError, naming, refused
from launcher.util.hub_cache import cached_folder, fetch_weights
from launcher.util.json_file import read_json

_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_REVISION: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")


class PeftFolder(contextlib.ExitStack):
    """Adapters in a folder that PEFT's save_pretrained has written, open in a `with` block.

    Args:
        base: the model beside which they were trained.

    Raises:
        UserError: ours cannot compute the same, or files are missing or damaged.
    """

    checkpoint = None

    def __init__(self, folder: Path, base: ModelConfig) -> None:
        super().__init__()
        self._path, self._settings = folder / WEIGHTS_FILE, Settings.read(folder)
        self._projections = projections(base)
        fetch_weights(folder, [WEIGHTS_FILE])
        self._file: Any = self.enter_context(opened_safetensors(self._path))
        self._names = set(self._file.keys())
        self._ranks = {p.module: self._rank(p) for p in self._projections}
        self._check_names()
        self._check_against_settings()
        self.config = self._adapted(base)

    def notes(self) -> list[str]:
        """Return how further training here differs from PEFT's; outputs are the same."""
        lora, present = self.config.lora, [p for p in self._projections if self._ranks[p.module]]
        assert lora is not None
        found = []
        if joined := [p for p in present if p.sizes[1:]]:
            found.append(
                f"each {short_name(joined[0].module)} has one adapter there and "
                f"{len(joined[0].sizes)} here: {DIFFERS}"
            )
        rescaled = [p for p in present if not math.isclose(self._scale(p), lora.scale)]
        if rescaled:
            found.append(
                f"{len(rescaled)} of {len(present)} adapters have a scale of their own, which is "
                f"multiplied into their B, as here all have {lora.scale:g}: {DIFFERS}"
            )
        return found

    def has(self, name: str) -> bool:
        """Return whether it is a matrix of one of our adapters."""
        return bool(self._found(name))

    def read(self, name: str) -> Tensor:
        """Return a whole matrix of ours in fp32.

        A missing adapter, and a rank below that of others, is padded with zeros, which get no
        gradients and stay zero.
        """
        half = name[-1]
        return torch.cat([self._read(projection, half) for projection in self._found(name)])

    def read_into(self, shard: Shard) -> None:
        """Fill a range."""
        places = shard.places
        shard.data.copy_(self.read(shard.name).flatten()[places.start : places.stop])

    def _found(self, name: str) -> list[Projection]:
        module, _, half = name.rpartition(".")
        assert self.config.lora is not None
        targets = self.config.lora.targets if half in ("lora_a", "lora_b") else ()
        return [p for p in self._projections if p.ours == module and p.target in targets]

    def _read(self, projection: Projection, half: str) -> Tensor:
        lora, rank = self.config.lora, self._ranks[projection.module]
        assert lora is not None
        if half == "a":
            a = torch.zeros(lora.rank, projection.inner)
            if rank:
                a[:rank] = self._tensor(adapter_key(projection, "A"))
            # Ours have an A each: equal at first, and then trained apart.
            return a.repeat(len(projection.sizes), 1)
        b = torch.zeros(sum(projection.sizes), lora.rank)
        if rank:
            # All of ours have one scale: what differs from it goes into B.
            ratio = self._scale(projection) / lora.scale
            b[:, :rank] = self._tensor(adapter_key(projection, "B")) * ratio
        return b

    def _scale(self, projection: Projection) -> float:
        """Return the scale of a projection's adapter in PEFT."""
        module = projection.module
        return self._settings.scale_of(module, self._ranks[module])

    def _tensor(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key).float()
        if not tensor.isfinite().all():
            raise UserError(
                f"{self._path}: {key} has values that are NaN or infinite; fetch it again"
            )
        return tensor

    def _rank(self, projection: Projection) -> int:
        """Return the rank of a projection's adapter, 0 without one."""
        keys = [adapter_key(projection, half) for half in "AB"]
        missing = [key for key in keys if key not in self._names]
        if len(missing) == 2:
            return 0
        if missing:
            raise UserError(f"{self._path}: lacks {missing[0]}; save the adapter again")
        found = [list(self._file.get_slice(key).get_shape()) for key in keys]
        rank = found[0][0] if found[0] else 1
        wanted = [[rank, projection.inner], [sum(projection.sizes), rank]]
        if found != wanted:
            raise UserError(
                f"{self._path}: {keys[0]} and B are {found[0]} and {found[1]}, and the base has "
                f"{wanted[0]} and {wanted[1]} there; give the base that belongs to it"
            )
        return int(rank)

    def _check_names(self) -> None:
        known = {adapter_key(projection, half) for projection in self._projections for half in "AB"}
        if unknown := sorted(self._names - known):
            raise UserError(
                f"{self._path}: {unknown[0]} is no adapter of a block's projection, and "
                "shardscale has no others: train without it, or give the base that belongs to it"
            )
        if not any(self._ranks.values()):
            raise UserError(f"{self._path}: holds no adapters; save the adapter again")

    def _check_against_settings(self) -> None:
        """Check that exactly the adapters of the settings are there, in their ranks."""
        settings = self._settings
        for projection in self._projections:
            module, rank = projection.module, self._ranks[projection.module]
            field = settings.refuses(module)
            if rank and field is not None:
                raise UserError(
                    f"{settings.path}: {field} is {settings.values[field]!r}, which leaves out "
                    f"{module}, and {WEIGHTS_FILE} has an adapter on it: save it again with PEFT"
                )
            if not rank and field is None:
                raise UserError(
                    f"{settings.path}: target_modules is {settings.values['target_modules']!r}, "
                    f"and {WEIGHTS_FILE} has no adapter on {module}: save it again with PEFT"
                )
            name, said = settings.rank_of(module)
            if rank not in (0, said):
                raise UserError(
                    f"{settings.path}: {name} is {said}, and the adapter on {module} in "
                    f"{WEIGHTS_FILE} has rank {rank}: save it again with PEFT"
                )

    def _adapted(self, base: ModelConfig) -> ModelConfig:
        lora = self._lora()
        if not isinstance(base, ForeignConfig):
            return dataclasses.replace(base, lora=lora)
        from launcher.model.foreign.reading import with_adapters

        with refused(ValueError, f"{self._settings.path}: {WHY}"):
            return with_adapters(base, lora)

    def _lora(self) -> Lora:
        settings = self._settings.values
        present = [p for p in self._projections if self._ranks[p.module]]
        rank, alpha = max(self._ranks.values()), float(settings["lora_alpha"])
        scales = {self._scale(projection) for projection in present}
        growth = self._settings.growth(rank)
        if scales != {alpha / growth} and len(scales) == 1:  # alpha_pattern covers all of them
            alpha = scales.pop() * growth
        targets = {projection.target for projection in present}
        with refused(ValueError, f"{self._settings.path}: {WHY}"):
            return Lora(
                rank=rank,
                alpha=alpha,
                dropout=float(settings["lora_dropout"]),
                targets=tuple(sorted(targets, key=[*PROJECTIONS, *sorted(targets)].index)),
                rslora=settings["use_rslora"],
            )


def folder_beside(folder: Path) -> Path:
    """Return the folder of the model beside which a PEFT folder's adapters were trained: one of
    this machine, or a model of the Hub in its cache.

    Raises:
        UserError: it is not on this machine, and no model of the Hub.
    """
    document = read_json(folder / ADAPTER_CONFIG)
    named, revision = document.get(BASE_FIELD), str(document.get("revision") or "")
    if isinstance(named, str) and Path(named).is_dir():
        return Path(named)
    where = f"{folder / ADAPTER_CONFIG}: {BASE_FIELD} is {named!r}, which is no folder here"
    if not isinstance(named, str) or not _HUB_NAME.fullmatch(named):
        raise UserError(
            f"{where}: write there where the model is that the adapter was trained beside"
        )
    if revision and not _REVISION.fullmatch(revision):
        raise UserError(f"{where}, and revision {revision!r} names no commit: correct or remove it")
    with naming(f"{where}, and"):
        return cached_folder(named, revision or None)


def companions_beside(folder: Path) -> Path:
    """Return the folder of the tokenizer of the model beside a PEFT folder's adapters: of a run's
    checkpoint, the run.

    Raises:
        UserError: the model is not on this machine.
    """
    base = folder_beside(folder)
    run = None if (base / HF_CONFIG).is_file() else run_of(base)
    return run or base
