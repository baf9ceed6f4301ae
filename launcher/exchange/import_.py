"""`shardscale import`: a model of transformers as a run folder whose step 0 can be resumed."""

import itertools
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
import yaml
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.files import write_shards
from launcher.checkpoint.index import RankFile
from launcher.config.beginning import in_words
from launcher.data.build import TOKENIZER_FILE
from launcher.data.tokenizer import check_vocabulary, load_encoder, tokenizer_fingerprint
from launcher.errors import ExitCode, refusing
from launcher.exchange.companions import carry_in
from launcher.exchange.files import new_folder
from launcher.exchange.source import Source
from launcher.flags import one_sentence
from launcher.model.config import ModelConfig
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import checkpointed
from launcher.strategies.flat_shards import PARAM, Shard

_PART = re.compile(r"^(?:blocks\.\d+|\w+)")
"""Of our name of a parameter: its block, or `wte`, `wpe`, `ln_f` or `head`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Make a run folder to train on from a model of transformers."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A folder that transformers' save_pretrained has written."""
    out: Path
    """Run folder to make; must not exist yet."""


@refusing
def main(argv: Sequence[str]) -> int:
    """Import one model; 0 when the run folder is there, 2 when refused."""
    with one_sentence():
        options = tyro.cli(ImportOptions, args=list(argv), prog="shardscale import")
    print(import_model(options.folder, options.out))
    return ExitCode.DONE


def import_model(folder: Path, out: Path) -> str:
    """Make the run folder `out`; what to say about it.

    Raises:
        UserError: the model is not one that ours computes, or files are missing or damaged.
    """
    with Source(folder) as source, new_folder(out) as run:
        config = source.config
        tokenizer = _copy_tokenizer(folder, run, config)
        carry_in(folder, run)
        settings = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in in_words(config).items()
        }
        if tokenizer:
            settings["tokenizer"] = str(out.absolute() / TOKENIZER_FILE)
        (run / "config.yaml").write_text(
            yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
        )
        extra: Extra = {"config": settings, "model": config}
        if tokenizer:
            extra["tokenizer"] = tokenizer_fingerprint(run / TOKENIZER_FILE)
        _write_checkpoint(CheckpointFolder(run / "checkpoints"), source, extra)
    lines = [
        f"imported {folder} to {out}: {config.parameter_count:,} parameters",
        f"train it: torchrun --nproc 2 -m launcher.train --config {out / 'config.yaml'} "
        f"--resume {out} --data FILE",
    ]
    if not tokenizer:
        lines.insert(
            1, f"{folder} has no tokenizer.json: add --tokenizer FILE with the one it needs"
        )
    return "\n".join(lines)


def _copy_tokenizer(folder: Path, run: Path, config: ModelConfig) -> bool:
    """Put the tokenizer into the run folder; False where there is none."""
    target = run / TOKENIZER_FILE
    if (folder / TOKENIZER_FILE).exists():
        given = str(folder / TOKENIZER_FILE)
        encoder = load_encoder(given)  # refuses what training would refuse
        shutil.copyfile(given, target)
    elif (folder / "vocab.json").exists():  # what transformers wrote before tokenizer.json
        given = f"hf:{folder}"
        encoder = load_encoder(given)
        encoder.save(target)
    else:
        return False
    check_vocabulary(given, encoder.vocab_size, config.vocab_size)
    return target.exists()


def _write_checkpoint(folder: CheckpointFolder, source: Source, extra: Extra) -> None:
    """Step 0: the weights, and optimizer states that are all 0. Weights are read where they are, a
    piece at a time."""
    path = folder.begin(0)
    states, counters = checkpointed(OptimChoice())  # of the optimizer that a run has by default
    # From numpy: pages of zeros that nobody writes to take no memory.
    largest = max(map(math.prod, source.shapes.values()))
    zeros = torch.from_numpy(np.zeros(largest, dtype=np.float32))
    files: list[RankFile] = []
    for _, block in itertools.groupby(source.shapes, key=lambda name: _PART.findall(name)[0]):
        shards = itertools.chain.from_iterable(
            _shards(source, name, dict.fromkeys(states, zeros)) for name in block
        )
        files.append(write_shards(path / f"part-{len(files):05d}.safetensors", shards))
    checkpoint = Checkpoint(
        path=path,
        step=0,
        world_size=1,
        shapes=source.shapes,
        kinds=(PARAM, *states),
        counters=dict.fromkeys(counters, 0.0),
        extra=extra,
        rng=(),  # no random numbers have been drawn
        files=files,
    )
    checkpoint.check_coverage()
    checkpoint.write()
    folder.publish(path, 0)


def _shards(source: Source, name: str, states: Mapping[str, Tensor]) -> Iterator[Shard]:
    """A parameter's pieces as they are stored, and what an optimizer keeps of it."""
    for start, piece in source.parts(name):
        yield Shard(name=name, kind=PARAM, start=start, data=piece)
    for kind, values in states.items():
        yield Shard(name=name, kind=kind, start=0, data=values[: math.prod(source.shapes[name])])
