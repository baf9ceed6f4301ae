"""Write the run folder of a pruned model: weights and masks at step 0, and how they were made."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.pretrained.companions import carry_in
from launcher.checkpoint.pretrained.loading import Source
from launcher.checkpoint.pretrained.stored import dtype_at
from launcher.checkpoint.pretrained.weight_files import new_folder, write_json
from launcher.checkpoint.rank_files import write_shards
from launcher.config.init_from import in_words
from launcher.data.files import HUB_PREFIX, TOKENIZER_FILE
from launcher.data.tokenizer import load_encoder, tokenizer_fingerprint
from launcher.model.config import ModelConfig
from launcher.strategies.flat_shards import MASK, PARAM, Shard
from launcher.strategies.masks import mask_shapes, pack
from launcher.strategies.parameters import parameter_shapes
from launcher.util.errors import UserError

REPORT_FILE = "pruning.json"


def write_folder(
    out: Path,
    *,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    text_settings: Mapping[str, Any],
    source: Source,
    report: Mapping[str, Any],
) -> None:
    """Write the run folder `out` atomically.

    Args:
        tensors: every parameter, fp32.
        masks: name of a projection -> bool, kept weights; empty for a smaller dense model.
        text_settings: fields of RunConfig that select the text.
        source: the model that was pruned, with its tokenizer and that one's companion files.
        report: content of pruning.json.

    Raises:
        UserError: `out` exists or cannot be written; nothing is left behind.
    """
    with new_folder(out) as run:
        settings = {**text_settings, **in_words(config)}
        settings = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
        extra: Extra = {"model": config, "pruned": report}
        if (tokenizer := source.tokenizer()) is not None:
            settings["tokenizer"] = tokenizer
            if Path(tokenizer).is_file():
                shutil.copyfile(tokenizer, run / TOKENIZER_FILE)
            elif tokenizer.startswith(HUB_PREFIX):  # of older transformers, without that file
                with contextlib.suppress(UserError):  # where no text is read, it need not load
                    load_encoder(tokenizer).save(run / TOKENIZER_FILE)
            if (run / TOKENIZER_FILE).exists():
                settings["tokenizer"] = str(out.absolute() / TOKENIZER_FILE)
                extra["tokenizer"] = tokenizer_fingerprint(run / TOKENIZER_FILE)
        if (dtype := dtype_at(Path(report["source"]))) is not None:
            extra["dtype"] = dtype
        extra["config"] = settings
        (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        write_json(run / REPORT_FILE, report)
        carry_in(source.beside, run)
        _write_checkpoint(run, parameter_shapes(config), tensors, masks, extra)


def _write_checkpoint(
    run: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    extra: Extra,
) -> None:
    """Write step 0 without optimizer states, which no longer fit the pruned weights."""
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.begin(0)

    def shards() -> Iterator[Shard]:
        for name, tensor in tensors.items():
            yield Shard(name=name, kind=PARAM, start=0, data=tensor.detach().flatten())
            if name in masks:
                yield Shard(name=name, kind=MASK, start=0, data=pack(masks[name]))

    checkpoint = Checkpoint(
        path=path,
        step=0,
        world_size=1,
        shapes=shapes,
        kinds=(PARAM, MASK) if masks else (PARAM,),
        own_shapes={MASK: mask_shapes(shapes)} if masks else {},
        counters={},
        extra=extra,
        rng=(),  # no random numbers drawn yet
        files=[write_shards(path / "part-00000.safetensors", shards)],
    )
    checkpoint.check_coverage()
    checkpoint.write()
    folder.publish(path, 0)
