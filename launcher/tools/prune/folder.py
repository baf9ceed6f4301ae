"""Write the run folder of a pruned model: weights and masks at step 0, and how they were made."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.files import write_shards
from launcher.checkpoint.pretrained.companions import carry_in
from launcher.checkpoint.pretrained.files import new_folder, write_json
from launcher.config.init_from import in_words
from launcher.data.files import TOKENIZER_FILE
from launcher.data.tokenizer import tokenizer_fingerprint
from launcher.model.config import ModelConfig
from launcher.strategies.flat_shards import MASK, PARAM, Shard
from launcher.strategies.mask_bits import pack
from launcher.strategies.masks import mask_shapes
from launcher.strategies.parameters import parameter_shapes

REPORT_FILE = "pruning.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Content of the run folder."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """Every parameter, fp32."""
    masks: Mapping[str, Tensor]
    """Name of a projection -> bool, kept weights; empty for a smaller dense model."""
    tokenizer: str | None
    """A tokenizer.json, byte or hf:NAME; None without a tokenizer."""
    settings: Mapping[str, Any]
    """Fields of RunConfig beyond the model: the text settings."""
    report: Mapping[str, Any]
    """Content of pruning.json: what was removed, how, and at what cost."""


def write_folder(out: Path, pruned: Pruned, beside: Path) -> None:
    """Write the run folder `out` atomically, with tokenizer companions copied from `beside`.

    Raises:
        UserError: `out` exists or cannot be written; nothing is left behind.
    """
    with new_folder(out) as run:
        settings = {**pruned.settings, **in_words(pruned.config)}
        settings = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
        extra: Extra = {"model": pruned.config, "pruned": pruned.report}
        if pruned.tokenizer is not None:
            settings["tokenizer"] = pruned.tokenizer
            if Path(pruned.tokenizer).is_file():
                shutil.copyfile(pruned.tokenizer, run / TOKENIZER_FILE)
                settings["tokenizer"] = str(out.absolute() / TOKENIZER_FILE)
                extra["tokenizer"] = tokenizer_fingerprint(run / TOKENIZER_FILE)
        extra["config"] = settings
        (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        write_json(run / REPORT_FILE, pruned.report)
        carry_in(beside, run)
        _write_checkpoint(run, pruned, extra)


def _write_checkpoint(run: Path, pruned: Pruned, extra: Extra) -> None:
    """Write step 0 without optimizer states, which no longer fit the pruned weights."""
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.begin(0)
    shapes = parameter_shapes(pruned.config)
    checkpoint = Checkpoint(
        path=path,
        step=0,
        world_size=1,
        shapes=shapes,
        kinds=(PARAM, MASK) if pruned.masks else (PARAM,),
        own_shapes={MASK: mask_shapes(shapes)} if pruned.masks else {},
        counters={},
        extra=extra,
        rng=(),  # no random numbers drawn yet
        files=[write_shards(path / "part-00000.safetensors", lambda: _shards(pruned))],
    )
    checkpoint.check_coverage()
    checkpoint.write()
    folder.publish(path, 0)


def _shards(pruned: Pruned) -> Iterator[Shard]:
    for name, tensor in pruned.tensors.items():
        yield Shard(name=name, kind=PARAM, start=0, data=tensor.detach().flatten())
        if name in pruned.masks:
            yield Shard(name=name, kind=MASK, start=0, data=pack(pruned.masks[name]))
