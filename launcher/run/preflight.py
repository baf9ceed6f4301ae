"""Everything that can be refused, refused before anything starts; and what must exist, made once.

The torchrun agent runs this before it starts ranks, so bad input is one sentence and not one
traceback per rank. Ranks run it again, which is cheap: the corpus is cached by then.
"""

import dataclasses
import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.files import RangeReader
from launcher.checkpoint.store import candidates
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, check_run_folder, resolve, steps_of_epochs
from launcher.config.schema import RunConfig
from launcher.data import Corpus, open_corpus
from launcher.measure.loggers import require_loggers
from launcher.measure.nvml import names_gpu
from launcher.optim.registry import checkpointed
from launcher.parallel.world import OWN_AGENT, choose_device
from launcher.run.base import check_beginning, same_base
from launcher.run.enough_room import check_checkpoint_room, check_offload, refuse_what_cannot_fit
from launcher.run.forecast import LoadForecast
from launcher.run.origin import Origin, find_origin
from launcher.run.provenance import check_model, check_tokenizer, with_recipe
from launcher.run.samples import Samples
from launcher.strategies import strategy_of, variant_of
from launcher.strategies.base import missing_library
from launcher.strategies.compiled import require_compilers
from launcher.strategies.flat_shards import MASK, PARAM
from launcher.strategies.parameters import trained_shapes
from launcher.util.errors import UserError
from launcher.util.startup import libraries_say

LONGEST_LABEL = 150  # bytes of a name that can have 255; a model is called as its folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that has nothing left to refuse."""

    resolved: Resolved
    corpus: Corpus
    origin: Origin
    recipe: str
    """What the learning rate and its like are, and where they come from."""


def prepare(
    argv: Sequence[str],
    *,
    world_size: int,
    ranks_per_node: int,
    load_forecast: LoadForecast | None = None,
) -> Prepared:
    """Parse, resolve, check the run folder, and open (or build) the tokenised corpus.

    Raises:
        UserError: whatever the user can fix.
    """
    config = parse_run_config(argv, world_size=world_size)
    libraries_say(config.loop.log_level)
    origin = find_origin(config.loop, os.environ)
    config, recipe = with_recipe(config, origin.source)
    resolved = _possible_here(config, world_size=world_size, ranks_per_node=ranks_per_node)
    config = resolved.config
    refuse_what_cannot_fit(resolved, world_size=world_size, ranks_per_node=ranks_per_node)
    if resolved.model.checkpointing.budget_bytes is not None:
        resolved = _budgeted(resolved, load_forecast, world_size=world_size)
    if config.loop.compile:
        require_compilers(config.loop.device)
    require_loggers(config.measure.loggers)
    if not origin.reopens:
        out = config.loop.out or default_run_folder(resolved)
        check_run_folder(out)
        check_checkpoint_room(out, resolved)
    checkpoint = None
    if origin.source is None:
        check_beginning(resolved)
    if origin.source is not None:
        checkpoint = _check_checkpoint(
            origin, resolved, reads_all=_reads_for_all(world_size, ranks_per_node)
        )
    elif origin.over:
        raise UserError(
            f"--out {config.loop.out}: this run is completed, and nothing is left to do"
        )
    check_offload(config, resolved.own_model, world_size=world_size, ranks_per_node=ranks_per_node)
    corpus = _corpus_of(resolved)
    if config.loop.sample_every:
        Samples.of(resolved, corpus)  # refuses what it would refuse once all is built
    if checkpoint is not None:
        check_tokenizer(checkpoint, corpus, config.data.tokenizer)
    if config.loop.epochs is not None:
        sequences = corpus.train.sequence_count(resolved.seq_len)
        steps = steps_of_epochs(config.loop.epochs, sequences, resolved.global_batch)
        config = config.replace(steps=steps, epochs=None)
    return Prepared(
        resolved=dataclasses.replace(resolved, config=config),
        corpus=corpus,
        origin=origin,
        recipe=recipe,
    )


def _corpus_of(resolved: Resolved) -> Corpus:
    return open_corpus(
        resolved.config.data,
        vocab_size=resolved.model.vocab_size,
        seq_len=resolved.seq_len,
        show_progress=resolved.config.loop.log_level in ("debug", "info"),
    )


def _possible_here(config: RunConfig, *, world_size: int, ranks_per_node: int) -> Resolved:
    """Resolved, with what is installed on this machine.

    Raises:
        UserError: a choice is invalid, or its library is missing.
    """
    device_type = choose_device(config.loop.device, ranks_per_node)
    if device_type == "cuda" and config.loop.expandable_segments:
        config = config.replace(expandable_segments=_segments_may_expand())
    resolved = resolve(config, world_size=world_size, device_type=device_type)
    if missing := missing_library(strategy_of(resolved.config)):
        raise UserError(missing)
    return resolved


def _budgeted(
    resolved: Resolved, load_forecast: LoadForecast | None, *, world_size: int
) -> Resolved:
    if load_forecast is None:
        raise UserError(
            f"--activation-checkpointing {resolved.model.activation_checkpointing}: a budget is "
            "divided by the forecast, which this start has none of: name what each block keeps"
        )
    return load_forecast().within_budget(resolved, world_size=world_size)


def _segments_may_expand() -> bool:
    """Whether torch can let the allocator's segments grow on this process's GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if names_gpu(local_rank if local_rank < torch.cuda.device_count() else 0):
        return True
    if os.environ.get("RANK", "0") == "0" and OWN_AGENT not in os.environ:
        logging.getLogger("shardscale").warning(
            "NVML does not name the GPU, and torch's expandable segments do not go without: they "
            "are off"
        )
    return False


def _reads_for_all(world_size: int, ranks_per_node: int) -> bool:
    """Whether this process reads a whole checkpoint before anything starts, so that ranks need
    not: torchrun's agent, or a run's only process.

    Not where there are several nodes, each of which would read all of it: there a damaged byte
    shows when the ranks load what they hold.
    """
    rank = os.environ.get("RANK")
    alone = rank is None or (rank == "0" and OWN_AGENT not in os.environ)
    return alone and world_size == ranks_per_node


def _check_checkpoint(origin: Origin, resolved: Resolved, *, reads_all: bool) -> Checkpoint:
    """The newest intact one of the origin, which is of this model, and training is not over.

    Raises:
        DamagedCheckpoint: none is intact.
        UserError: it cannot be gone on from.
    """
    source = origin.source
    assert source is not None
    checkpoint = _newest_intact(source, reads_all=reads_all)
    check_model(checkpoint, resolved.model)
    shapes = trained_shapes(resolved.model)
    states, counters = checkpointed(resolved.config.optim, shapes)
    kinds = (PARAM, *states, *((MASK,) if resolved.model.masks else ()))
    checkpoint.check_model(shapes, kinds, counters)
    if reads_all and (problem := same_base(checkpoint, resolved)) is not None:
        raise problem
    steps = resolved.config.loop.steps
    if steps is not None and checkpoint.step >= steps and (origin.over or not origin.reopens):
        raise UserError(
            f"--resume {source}: step {checkpoint.step} is already reached there, and --steps is "
            f"{steps}: give more steps"
        )
    stop = resolved.config.loop.stop_after
    if stop is not None and checkpoint.step >= stop and (origin.over or not origin.reopens):
        raise UserError(
            f"--resume {source}: step {checkpoint.step} is already reached there, and --stop-after "
            f"is {stop}: give a later step, or leave it out"
        )
    return checkpoint


def _newest_intact(source: Path, *, reads_all: bool) -> Checkpoint:
    """Loading takes the same one, and says which damaged ones it has skipped."""
    damages = []
    for path in candidates(source):
        try:
            checkpoint = Checkpoint.open(path)
            if reads_all:
                with RangeReader(checkpoint) as reader:
                    reader.check()
        except DamagedCheckpoint as error:
            damages.append(error)
        else:
            return checkpoint
    raise damages[0]


def default_run_folder(resolved: Resolved) -> Path:
    """A folder name nobody has used: runs/TIME-MODEL-STRATEGY."""
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    label = resolved.config.model.label.encode()[:LONGEST_LABEL].decode(errors="ignore")
    stem = f"{time}-{label}-{variant_of(resolved.config).label}"
    folder = Path("runs") / stem
    attempt = 2
    while folder.exists():
        folder = Path("runs") / f"{stem}-{attempt}"
        attempt += 1
    return folder
