"""`shardscale import`: turn a model of transformers into a run folder, to resume from step 0."""

import itertools
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.index import RankFile
from launcher.checkpoint.pretrained.companions import carry_in
from launcher.checkpoint.pretrained.peft import companions_beside, folder_beside
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.checkpoint.pretrained.stored import Adapted, dtype_at, open_stored
from launcher.checkpoint.pretrained.weight_files import new_folder
from launcher.checkpoint.rank_files import write_shards
from launcher.config.init_from import ADAPTER_CONFIG, HF_CONFIG, in_words, tokenizer_in
from launcher.config.model import adapter_flags
from launcher.config.resolve import check_run_folder
from launcher.config.transformers_config import decoder_of
from launcher.data.files import TOKENIZER_FILE
from launcher.data.tokenizer import check_vocabulary, load_encoder, tokenizer_fingerprint
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import checkpointed
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import trained_shapes
from launcher.util.flags import MOST_ITEMS
from launcher.util.hub_cache import HUB_PREFIX, existing_model

_PART = re.compile(r"^(?:blocks\.\d+|\w+)")
"""Prefix of a parameter's name: its block, or `wte`, `wpe`, `ln_f` or `head`."""

Parts = Callable[[str], Iterator[tuple[int, Tensor]]]
"""Name of a parameter -> its flattened ranges: first element and data of each."""


def import_model(folder: Path, out: Path) -> str:
    """Write the run folder `out`; returns a description.

    Raises:
        UserError: an unsupported model, or files that are missing or damaged.
    """
    check_run_folder(out)
    folder = existing_model(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return _import_adapter(folder, out)
    with TransformersWeights(folder) as source, new_folder(out) as run:
        config = source.config
        tokenizer = _copy_tokenizer(folder, run, config)
        extra = _write_config(run, out, config, in_words(config), tokenizer=tokenizer)
        if (dtype := dtype_at(folder)) is not None:
            extra["dtype"] = dtype
        if config.window is None:
            at_any_context = decoder_of(folder / HF_CONFIG, "own", {"context": MOST_ITEMS})
            if (window := at_any_context.window) is not None:
                extra["hidden_window"] = window
        carry_in(folder, run)
        _write_checkpoint(run, source.shapes, source.parts, extra)
    return _description(folder, out, config.parameter_count, tokenizer=tokenizer)


def _import_adapter(folder: Path, out: Path) -> str:
    """Import an adapter of PEFT, with the base weights that it names."""
    base, companions = folder_beside(folder), companions_beside(folder)
    with open_stored(folder) as stored, new_folder(out) as run:
        config = stored.config
        places = [place for place in (folder, companions) if (place / TOKENIZER_FILE).exists()]
        tokenizer = bool(places) and _copy_tokenizer(places[0], run, config)
        words: dict[str, Any] = in_words(config)
        if isinstance(config, ForeignConfig):
            decoder = {"model": f"{HUB_PREFIX}{base.absolute()}", "decoder": "transformers"}
            words = {**decoder, **adapter_flags(config.lora)}
        words["init_from"] = str(base.absolute())
        extra = _write_config(run, out, config, words, tokenizer=tokenizer)
        extra["base"] = stored.base()
        carry_in(companions, run)

        def parts(name: str) -> Iterator[tuple[int, Tensor]]:
            yield 0, stored.read(name).flatten()

        _write_checkpoint(run, trained_shapes(config), parts, extra)
        notes = stored.notes() if isinstance(stored, Adapted) else []
    description = _description(folder, out, config.trained_parameter_count, tokenizer=tokenizer)
    return "\n".join([description, *notes])


def _write_config(
    run: Path, out: Path, config: ModelConfig, words: Mapping[str, Any], *, tokenizer: bool
) -> Extra:
    """Write config.yaml; returns the extra part of the checkpoint."""
    settings = {
        name: list(value) if isinstance(value, tuple) else value for name, value in words.items()
    }
    if tokenizer:
        settings["tokenizer"] = str(out.absolute() / TOKENIZER_FILE)
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    extra: Extra = {"config": settings, "model": config}
    if tokenizer:
        extra["tokenizer"] = tokenizer_fingerprint(run / TOKENIZER_FILE)
    return extra


def _description(folder: Path, out: Path, parameters: int, *, tokenizer: bool) -> str:
    config, run = (shlex.quote(str(path)) for path in (out / "config.yaml", out))
    lines = [
        f"imported {folder} to {out}: {parameters:,} parameters",
        f"train: torchrun --nproc 2 -m launcher.train --config {config} --resume {run} --data FILE",
    ]
    if not tokenizer:
        lines.insert(1, f"{folder} has no tokenizer.json: add --tokenizer FILE with its tokenizer")
    return "\n".join(lines)


def _copy_tokenizer(folder: Path, run: Path, config: ModelConfig) -> bool:
    """Copy the tokenizer into the run folder; False without one."""
    target = run / TOKENIZER_FILE
    if (folder / TOKENIZER_FILE).exists():
        given = str(folder / TOKENIZER_FILE)
        encoder = load_encoder(given)  # refuses what training refuses
        shutil.copyfile(given, target)
    elif (found := tokenizer_in(folder)) is not None:  # older transformers wrote no tokenizer.json
        given = found
        encoder = load_encoder(given)
        encoder.save(target)
    else:
        return False
    check_vocabulary(given, encoder.rows, config.vocab_size)
    return target.exists()


def _write_checkpoint(
    run: Path, shapes: Mapping[str, tuple[int, ...]], parts: Parts, extra: Extra
) -> None:
    """Write step 0: the weights, and optimizer states of zeros. Weights are read range by range."""
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.begin(0)
    # States of the default optimizer.
    states, counters = checkpointed(OptimChoice(), shapes)
    # From numpy, whose untouched pages of zeros take no memory.
    largest = max(map(math.prod, shapes.values()))
    zeros = torch.from_numpy(np.zeros(largest, dtype=np.float32))
    files: list[RankFile] = []
    zero_states = dict.fromkeys(states, zeros)
    for _, block in itertools.groupby(shapes, key=lambda name: _PART.findall(name)[0]):
        shards = partial(_shards, {name: shapes[name] for name in block}, parts, zero_states)
        files.append(write_shards(path / f"part-{len(files):05d}.safetensors", shards))
    checkpoint = Checkpoint(
        path=path,
        step=0,
        world_size=1,
        shapes=shapes,
        kinds=(PARAM, *states),
        counters=dict.fromkeys(counters, 0.0),
        extra=extra,
        rng=(),  # no random numbers drawn yet
        files=files,
    )
    checkpoint.check_coverage()
    checkpoint.write()
    folder.publish(path, 0)


def _shards(
    shapes: Mapping[str, tuple[int, ...]], parts: Parts, zero_states: Mapping[str, Tensor]
) -> Iterator[Shard]:
    """Yield each parameter's ranges, then its optimizer states."""
    for name, shape in shapes.items():
        for start, piece in parts(name):
            yield Shard(name=name, kind=PARAM, start=start, data=piece)
        for kind, zeros in zero_states.items():
            yield Shard(name=name, kind=kind, start=0, data=zeros[: math.prod(shape)])
