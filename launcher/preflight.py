"""Everything that can be refused, refused before anything starts; and what must exist, made once.

The torchrun agent runs this before it starts ranks, so bad input is one sentence and not one
traceback per rank. Ranks run it again, which is cheap: the corpus is cached by then.
"""

import dataclasses
import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.arguments import parse_run_config
from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.store import candidates
from launcher.data import Corpus, open_corpus
from launcher.errors import UserError
from launcher.model.gpt import GPT
from launcher.optim.registry import checkpointed
from launcher.origin import Origin, find_origin
from launcher.resolve import Resolved, check_run_folder, resolve, steps_of_epochs
from launcher.startup import libraries_say
from launcher.strategies.compiled import require_compilers
from launcher.strategies.deepspeed_config import build_config
from launcher.strategies.flat_shards import PARAM
from launcher.strategies.offload_check import check_offload
from launcher.world import choose_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that has nothing left to refuse."""

    resolved: Resolved
    corpus: Corpus
    origin: Origin


def prepare(argv: Sequence[str], *, world_size: int, ranks_per_node: int) -> Prepared:
    """Parse, resolve, check the run folder, and open (or build) the tokenised corpus.

    Raises:
        UserError: whatever the user can fix.
    """
    config = parse_run_config(argv)
    libraries_say(config.loop.says)
    device_type = choose_device(config.loop.device, ranks_per_node)
    resolved = resolve(config, world_size=world_size, device_type=device_type)
    config = resolved.config
    if config.loop.compile:
        require_compilers(config.loop.device)
    origin = find_origin(config.loop, os.environ)
    if not origin.reopens:
        check_run_folder(config.loop.out or default_run_folder(resolved))
    if origin.source is not None:
        _check_checkpoint(origin, resolved)
    elif origin.over:
        raise UserError(
            f"--out {config.loop.out}: this run is completed, and nothing is left to do"
        )
    if config.sharding.deepspeed is not None:
        _check_with_deepspeed(resolved, world_size)
    check_offload(config, resolved.model, world_size=world_size, ranks_per_node=ranks_per_node)
    corpus = open_corpus(
        data=config.data.data,
        field=config.data.data_field,
        stream_bytes=config.data.stream_bytes,
        show_progress=config.loop.says in ("debug", "info"),
        tokenizer=config.data.tokenizer,
        vocab_size=resolved.model.vocab_size,
        seq_len=resolved.seq_len,
    )
    if config.loop.epochs is not None:
        sequences = corpus.train.sequence_count(resolved.seq_len)
        steps = steps_of_epochs(config.loop.epochs, sequences, resolved.global_batch)
        config = config.replace(steps=steps, epochs=None)
    return Prepared(
        resolved=dataclasses.replace(resolved, config=config),
        corpus=corpus,
        origin=origin,
    )


def _check_checkpoint(origin: Origin, resolved: Resolved) -> None:
    """The newest one of the origin is of this model, and training is not over."""
    source = origin.source
    assert source is not None
    newest = candidates(source)[0]
    try:
        checkpoint = Checkpoint.open(newest)
    except DamagedCheckpoint:
        if newest == source:
            raise
        return  # loading says which one is damaged, and takes the one before
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(resolved.model).named_parameters()}
    states, counters = checkpointed(resolved.config.optim)
    checkpoint.check_model(shapes, (PARAM, *states), counters)
    steps = resolved.config.loop.steps
    if steps is not None and checkpoint.step >= steps and (origin.over or not origin.reopens):
        raise UserError(
            f"--resume {source}: step {checkpoint.step} is already reached there, and --steps is "
            f"{steps}: give more steps"
        )


def _check_with_deepspeed(resolved: Resolved, world_size: int) -> None:
    from launcher.strategies import zero  # takes seconds, so only for a user's own file

    config = resolved.config
    assert config.sharding.deepspeed is not None
    section = build_config(
        config, resolved.model, accumulation=resolved.accumulation, world_size=world_size
    )["zero_optimization"]
    zero.check_section(config.sharding.deepspeed, section, torch.device(config.loop.device))


def default_run_folder(resolved: Resolved) -> Path:
    """A folder name nobody has used: runs/TIME-MODEL-STRATEGY."""
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = f"{time}-{resolved.config.model.model}-{resolved.strategy_label}"
    folder = Path("runs") / stem
    attempt = 2
    while folder.exists():
        folder = Path("runs") / f"{stem}-{attempt}"
        attempt += 1
    return folder
