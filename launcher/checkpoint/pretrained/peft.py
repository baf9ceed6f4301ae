"""Adapters as PEFT has them: adapter_config.json and adapter_model.safetensors."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.adapters import Projection, projections
from launcher.checkpoint.pretrained.files import opened_safetensors, write_json, write_safetensors
from launcher.checkpoint.pretrained.peft_settings import Settings
from launcher.config.init_from import ADAPTER_CONFIG
from launcher.model.config import ModelConfig
from launcher.model.lora_config import TARGETS, Lora
from launcher.strategies.flat_shards import Shard
from launcher.util.errors import UserError
from launcher.util.json_file import read_json

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_DIFFERS = "same outputs, but training on differs from PEFT's"
_BASE = "base_model_name_or_path"


class PeftFolder:
    """The adapters in a folder that PEFT's save_pretrained has written, as ours.

    Args:
        folder: where they are.
        base: the model that they are beside.

    Raises:
        UserError: they compute something that ours do not, or are missing or damaged.
    """

    checkpoint = None

    def __init__(self, folder: Path, base: ModelConfig) -> None:
        self._path, self._settings = folder / WEIGHTS_FILE, Settings.read(folder)
        self._projections = projections(base)
        with contextlib.ExitStack() as opening:
            self._file: Any = opening.enter_context(opened_safetensors(self._path))
            self._names = set(self._file.keys())
            self._ranks = {p.module: self._rank(p) for p in self._projections}
            self._check_names()
            self._check_against_settings()
            self.config = dataclasses.replace(base, lora=self._lora())
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def notes(self) -> list[str]:
        """How training on here differs from PEFT, whose outputs are the same; empty where it does
        not."""
        lora, present = self.config.lora, [p for p in self._projections if self._ranks[p.module]]
        assert lora is not None
        found = []
        if joined := [p for p in present if p.sizes[1:]]:
            found.append(
                f"each {_short_name(joined[0].module)} has one adapter there and "
                f"{len(joined[0].sizes)} here: {_DIFFERS}"
            )
        rescaled = [p for p in present if not math.isclose(self._scale(p), lora.scale)]
        if rescaled:
            found.append(
                f"{len(rescaled)} of {len(present)} adapters have a scale of their own, which is "
                f"multiplied into their B, as here all have {lora.scale:g}: {_DIFFERS}"
            )
        return found

    def has(self, name: str) -> bool:
        """Whether it is a matrix of one of our adapters."""
        return bool(self._found(name))

    def read(self, name: str) -> Tensor:
        """A whole matrix of ours, fp32. Zeros stand for the adapter that a projection does not
        have, and for the rank that it has less than others: they have no gradients, and stay."""
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
                a[:rank] = self._tensor(_key(projection, "A"))
            return a.repeat(len(projection.sizes), 1)
        b = torch.zeros(sum(projection.sizes), lora.rank)
        if rank:
            ratio = self._scale(projection) / lora.scale
            b[:, :rank] = self._tensor(_key(projection, "B")) * ratio
        return b

    def _scale(self, projection: Projection) -> float:
        """A projection's adapter's, in PEFT."""
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
        """Of a projection's adapter, 0 where it has none."""
        keys = [_key(projection, half) for half in "AB"]
        missing = [key for key in keys if key not in self._names]
        if len(missing) == 2:
            return 0
        if missing:
            raise UserError(f"{self._path}: lacks {missing[0]}; save the adapter again")
        (rank, inner), (outer, same) = (self._file.get_slice(key).get_shape() for key in keys)
        wanted = [projection.inner, sum(projection.sizes), rank]
        if [inner, outer, same] != wanted:
            raise UserError(
                f"{self._path}: {keys[0]} and B are [{rank}, {inner}] and [{outer}, {same}], and "
                f"the base has [{rank}, {wanted[0]}] and [{wanted[1]}, {rank}] there; give the "
                "base that belongs to it"
            )
        return int(rank)

    def _check_names(self) -> None:
        known = {_key(projection, half) for projection in self._projections for half in "AB"}
        if unknown := sorted(self._names - known):
            raise UserError(
                f"{self._path}: {unknown[0]} is no adapter of a block's projection, and "
                "shardscale has no others: train without it, or give the base that belongs to it"
            )
        if not any(self._ranks.values()):
            raise UserError(f"{self._path}: holds no adapters; save the adapter again")

    def _check_against_settings(self) -> None:
        """Each adapter is one that the settings ask for, of the rank that they say."""
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

    def _lora(self) -> Lora:
        settings = self._settings.values
        present = [p for p in self._projections if self._ranks[p.module]]
        rank, alpha = max(self._ranks.values()), float(settings["lora_alpha"])
        scales = {self._scale(projection) for projection in present}
        growth = self._settings.growth(rank)
        if scales != {alpha / growth} and len(scales) == 1:  # a pattern says it of all
            alpha = scales.pop() * growth
        targets = {projection.target for projection in present}
        try:
            return Lora(
                rank=rank,
                alpha=alpha,
                dropout=float(settings["lora_dropout"]),
                targets=tuple(target for target in TARGETS if target in targets),
                rslora=settings["use_rslora"],
            )
        except ValueError as error:
            raise UserError(f"{self._settings.path}: {error}") from None


def folder_beside(folder: Path) -> Path:
    """The folder of the model that a PEFT folder's adapters are beside.

    Raises:
        UserError: it is not here.
    """
    named = read_json(folder / ADAPTER_CONFIG).get(_BASE)
    if not isinstance(named, str) or not Path(named).is_dir():
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: {_BASE} is {named!r}, which is no folder here: write "
            "there where the model is that the adapter was trained beside"
        )
    return Path(named)


def write_adapter(
    folder: Path,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    dtype: torch.dtype,
) -> str:
    """Write both files, of adapters that `read` fetches by our names, beside the model at `base`;
    what to say of them.

    What is three matrices of ours and one of theirs becomes one adapter of three times the rank,
    with the blocks of B in their places: PEFT trains the zeros between them, too.

    Raises:
        UserError: no family of transformers has this model.
        OSError: no room, most often.
    """
    lora = config.lora
    assert lora is not None
    rank = lora.rank
    chosen = [p for p in projections(config) if p.target in lora.targets]
    tensors = {_key(p, half): (p, half) for p in chosen for half in "AB"}

    def shape(projection: Projection, half: str) -> tuple[int, ...]:
        own_rank = rank * len(projection.sizes)
        return (own_rank, projection.inner) if half == "A" else (sum(projection.sizes), own_rank)

    def tensor(key: str) -> Tensor:
        projection, half = tensors[key]
        ours = read(f"{projection.ours}.lora_{half.lower()}")
        if half == "A":
            first, count = projection.number * rank, len(projection.sizes) * rank
            return ours[first : first + count]
        rows = ours[projection.first : projection.first + sum(projection.sizes)]
        blocks: Tensor = torch.block_diag(*rows.split(list(projection.sizes)))
        return blocks

    write_safetensors(
        folder / WEIGHTS_FILE,
        {key: shape(*which) for key, which in tensors.items()},
        tensor,
        dtype=dtype,
        metadata={"format": "pt"},
    )
    write_json(folder / ADAPTER_CONFIG, _settings_of(chosen, lora, base=base))
    joined = next((p for p in chosen if p.sizes[1:]), None)
    if joined is None:
        return "an adapter for PEFT"
    count = len(joined.sizes)
    return (
        f"an adapter for PEFT, of rank {count * rank} on {_short_name(joined.module)} for {count} "
        f"of rank {rank} here: {_DIFFERS}"
    )


def _settings_of(chosen: Sequence[Projection], lora: Lora, *, base: str | None) -> dict[str, Any]:
    names = {_short_name(p.module): len(p.sizes) for p in chosen}
    joined = {name: count for name, count in names.items() if count > 1}
    growth = math.sqrt if lora.rslora else float
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        _BASE: base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": list(names),
        "rank_pattern": {name: lora.rank * count for name, count in joined.items()},
        "alpha_pattern": {name: lora.alpha * growth(count) for name, count in joined.items()},
        "bias": "none",
        "fan_in_fan_out": chosen[0].part.transposed,
        "inference_mode": True,
    }


def _short_name(module: str) -> str:
    """The end of a module's name that no other kind of module has: GPT-2 calls two c_proj."""
    owner, name = module.split(".")[-2:]
    return f"{owner}.{name}" if name == "c_proj" else name


def _key(projection: Projection, half: str) -> str:
    """Of A or B in the file."""
    return f"base_model.model.{projection.module}.lora_{half}.weight"
