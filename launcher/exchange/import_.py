"""`shardscale import`: a GPT-2 of transformers as a run folder whose step 0 can be resumed."""

import dataclasses
import itertools
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
import yaml

from launcher.checkpoint import Checkpoint, CheckpointFolder
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.files import write_shards
from launcher.checkpoint.index import RankFile
from launcher.config.arguments import one_sentence
from launcher.data.build import TOKENIZER_FILE
from launcher.data.tokenizer import load_encoder, tokenizer_fingerprint
from launcher.errors import ExitCode, UserError
from launcher.exchange.huggingface import (
    EMBEDDING,
    HEAD,
    PREFIX,
    Counterpart,
    counterparts,
    from_config_json,
)
from launcher.exchange.output import new_folder
from launcher.exchange.safetensors_files import Weights, read_json
from launcher.model.config import NAMED, ModelConfig
from launcher.strategies.flat_shards import PARAM, Shard, element_count

# AdamW's, before its first step.
_STATE_KINDS = ("exp_avg", "exp_avg_sq")
_COUNTERS = {"step": 0.0}

_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""The causal mask, which older versions of transformers have saved with the weights."""
_BLOCK = re.compile(r"^(?:transformer\.)?h\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """What to import, and where to."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A folder that transformers' save_pretrained has written."""
    out: Path
    """Run folder to make; must not exist yet."""


def main(argv: Sequence[str]) -> int:
    """Import one model; 0 when the run folder is there, 2 when refused."""
    try:
        with one_sentence():
            options = tyro.cli(
                ImportOptions,
                args=list(argv),
                prog="shardscale import",
                description="Make a run folder to train on from a GPT-2 of transformers.",
            )
        print(import_model(options.folder, options.out))
    except UserError as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.DONE


def import_model(folder: Path, out: Path) -> str:
    """Make the run folder `out`; what to say about it.

    Raises:
        UserError: the model is not one that ours computes, or files are missing or damaged.
    """
    config = from_config_json(read_json(folder / "config.json"), folder / "config.json")
    with Weights(folder) as weights, new_folder(out) as run:
        sources = _match(weights, config, folder)
        tokenizer = _copy_tokenizer(folder, run)
        settings = _settings(config)
        if tokenizer:
            settings["tokenizer"] = str(out.absolute() / TOKENIZER_FILE)
        (run / "config.yaml").write_text(
            yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
        )
        extra: Extra = {"config": settings, "model": config}
        if tokenizer:
            extra["tokenizer"] = tokenizer_fingerprint(run / TOKENIZER_FILE)
        _write_checkpoint(CheckpointFolder(run / "checkpoints"), weights, sources, extra)
    lines = [
        f"imported {folder} to {out}: {config.parameter_count:,} parameters",
        f"train it: torchrun --nproc 2 -m launcher.train --config {out / 'config.yaml'} "
        f"--resume {out} --data FILE",
    ]
    if not tokenizer:
        lines.insert(1, f"{folder} has no tokenizer: add --tokenizer FILE with the one it needs")
    return "\n".join(lines)


def _match(weights: Weights, config: ModelConfig, folder: Path) -> list[tuple[Counterpart, str]]:
    """Each of our parameters with the name of the tensor that fills it; none is left over."""
    # GPT2LMHeadModel's names have a prefix, GPT2Model's do not; the hub has both.
    stored = {name.removeprefix(PREFIX): name for name in weights.names()}
    found = []
    for counterpart in counterparts(config):
        name = stored.pop(counterpart.theirs.removeprefix(PREFIX), None)
        if name is None:
            raise UserError(
                f"{folder}: has no tensor {counterpart.theirs}, which its config.json asks for; "
                "give the config.json that belongs to these weights"
            )
        weights.check(name, counterpart.their_shape)
        found.append((counterpart, name))
    head = stored.pop(HEAD, None)
    if head is not None:
        embedding = next(name for part, name in found if part.theirs == EMBEDDING)
        if not torch.equal(weights.read(head), weights.read(embedding)):
            raise UserError(
                f"{folder}: {HEAD} differs from {embedding}, but config.json says that they are "
                'tied; set "tie_word_embeddings": false there'
            )
    unknown = [name for short, name in stored.items() if not _BUFFERS.fullmatch(short)]
    blocks = [int(match[1]) for name in unknown if (match := _BLOCK.search(name))]
    if blocks and max(blocks) >= config.layers:
        raise UserError(
            f"{folder}: the weights have {max(blocks) + 1} blocks, and config.json says n_layer "
            f"{config.layers}; give the config.json that belongs to these weights"
        )
    if unknown:
        raise UserError(
            f"{folder}: {unknown[0]} belongs to no GPT-2 language model of shardscale; save it as "
            "a GPT2LMHeadModel"
        )
    return found


def _copy_tokenizer(folder: Path, run: Path) -> bool:
    """Put the tokenizer into the run folder; False where there is none."""
    target = run / TOKENIZER_FILE
    if (folder / TOKENIZER_FILE).exists():
        load_encoder(str(folder / TOKENIZER_FILE))  # refuses what training would refuse
        shutil.copyfile(folder / TOKENIZER_FILE, target)
    elif (folder / "vocab.json").exists():  # what transformers wrote before tokenizer.json
        load_encoder(f"hf:{folder}").save(target)
    return target.exists()


def _settings(config: ModelConfig) -> dict[str, Any]:
    """The model in the words of RunConfig, every dimension spelled out."""
    alike = (n for n, known in NAMED.items() if dataclasses.replace(config, dropout=0.0) == known)
    return {
        "model": next(alike, "gpt2"),
        "layers": config.layers,
        "heads": config.heads,
        "d_model": config.d_model,
        "d_ff": config.ffn_dim,
        "context": config.context,
        "vocab_size": config.vocab_size,
        "activation": config.activation,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tied": config.tied,
        "dropout": config.dropout,
    }


def _write_checkpoint(
    folder: CheckpointFolder,
    weights: Weights,
    sources: Sequence[tuple[Counterpart, str]],
    extra: Extra,
) -> None:
    """Step 0: the weights, and optimizer states that are all 0. One block in memory at a time."""
    path = folder.begin(0)
    largest = max(element_count(counterpart.shape) for counterpart, _ in sources)
    # From numpy: pages of zeros that nobody writes to take no memory.
    zeros = torch.from_numpy(np.zeros(largest, dtype=np.float32))
    files: list[RankFile] = []
    for _, block in itertools.groupby(sources, key=lambda source: _block(source[0].ours)):
        shards = []
        for counterpart, name in block:
            values = counterpart.turned(weights.read(name)).to(torch.float32).contiguous().view(-1)
            if not values.isfinite().all():
                raise UserError(
                    f"{name}: has values that are NaN or infinite, so nothing can be computed with "
                    "this model; fetch it again, or take a checkpoint from before it diverged"
                )
            kinds = {PARAM: values, **dict.fromkeys(_STATE_KINDS, zeros[: len(values)])}
            shards += [
                Shard(name=counterpart.ours, kind=kind, shape=counterpart.shape, start=0, data=data)
                for kind, data in kinds.items()
            ]
        files.append(write_shards(path / f"part-{len(files):05d}.safetensors", shards))
    checkpoint = Checkpoint(
        path=path,
        step=0,
        world_size=1,
        shapes={counterpart.ours: counterpart.shape for counterpart, _ in sources},
        kinds=(PARAM, *_STATE_KINDS),
        counters=_COUNTERS,
        extra=extra,
        rng=(),  # no random numbers have been drawn
        files=files,
    )
    checkpoint.check_coverage()
    checkpoint.write()
    folder.publish(path, 0)


def _block(name: str) -> str:
    """`blocks.3` of all parameters of that block, `wte`, `wpe`, `ln_f` or `head` of the others."""
    matched = re.match(r"blocks\.\d+|\w+", name)
    assert matched is not None
    return matched[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
