"""Prepare a run: refuse whatever can be refused before it starts, and tokenize its corpus once.

The torchrun agent runs this before it starts ranks, so bad input is one sentence and not one
traceback per rank. Ranks run it again, which is cheap: the corpus is cached by then.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from launcher.config import old_names
from launcher.config.arguments import parse_run_config
from launcher.config.recipes import described, fill, fill_as_saved, recipe_line, recipe_of, task_of
from launcher.config.resolve import Resolved, check_run_folder, resolve
from launcher.config.schema import RunConfig
from launcher.data import Corpus, open_corpus
from launcher.measure.loggers import require_loggers
from launcher.parallel.world import OWN_AGENT, choose_device
from launcher.run.capacity import check_checkpoint_room, check_minimum_memory, check_offload
from launcher.run.forecast_protocol import LoadForecast
from launcher.run.resume import AUTO, Resume, find_resume
from launcher.run.run_folder import default_run_folder, with_own_inputs
from launcher.strategies import strategy_of
from launcher.strategies.base import missing_library
from launcher.util.errors import UserError, naming
from launcher.util.startup import libraries_say

if TYPE_CHECKING:
    from launcher.checkpoint.extra import Extra


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that has passed all checks."""

    resolved: Resolved
    corpus: Corpus
    resume: Resume
    recipe: str
    """Learning rate and the like, and their source, for the console."""
    micro_batch_open: bool
    """The plan may choose it: a GPU's memory is to be used."""


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
    resume = find_resume(config.loop, os.environ)
    saved = saved_by(resume.source)
    config = with_own_inputs(config, resume.source, saved)
    check_weights_source(config, saved)
    config, recipe = with_recipe(config, saved)
    if config.data.leaves_micro_batch_open:
        config = with_saved_micro_batch(config, saved, world_size=world_size)
    micro_batch_open = config.data.leaves_micro_batch_open  # else the resumed run's
    resolved = _possible_here(config, saved, world_size=world_size, ranks_per_node=ranks_per_node)
    config = resolved.config
    check_minimum_memory(resolved, ranks_per_node=ranks_per_node)
    if resolved.model.checkpointing.budget_bytes is not None:
        resolved = _budgeted(resolved, load_forecast)
    require_loggers(config.measure.loggers)
    out = config.loop.out or default_run_folder(resolved)
    if not resume.reopens:
        check_run_folder(out, may_be_empty=True)
    if not resume.completed:
        check_checkpoint_room(out, resolved)
    checkpoint = None
    if resume.source is not None:
        from launcher.run.provenance import check_resume, check_steps, check_tokenizer

        reads_all = _reads_for_all(world_size, ranks_per_node)
        checkpoint = check_resume(resume, resolved, reads_all=reads_all)
    elif resume.completed:
        raise UserError(f"--out {config.loop.out}: ended without a checkpoint: give another one")
    else:
        check_init_from(resolved)
    check_offload(resolved, ranks_per_node=ranks_per_node)
    corpus = _corpus_of(resolved)
    if config.loop.epochs is not None:
        from launcher.run.epochs import with_steps

        config = with_steps(resolved, corpus)
    if checkpoint is not None:
        check_tokenizer(checkpoint, corpus, config.data.tokenizer)
        check_steps(resume, checkpoint.step, config.loop)
    return Prepared(
        resolved=dataclasses.replace(resolved, config=config),
        corpus=corpus,
        resume=resume,
        recipe=recipe,
        micro_batch_open=micro_batch_open and config.loop.device == "cuda",
    )


def saved_by(source: Path | None) -> "Extra":
    """Return what the run that is resumed has recorded; {} without one."""
    if source is None:
        return {}
    from launcher.run.provenance import newest_extra

    return newest_extra(source) or {}


def check_weights_source(config: RunConfig, saved: "Extra") -> None:
    """Refuse --init-from beside --resume, except for the weights that the resumed run began with.

    Raises:
        UserError: both name weights, and the checkpoint's run began with others.
    """
    folder, resume = config.model.init_from, config.loop.resume
    if folder is None or resume in (None, AUTO):
        return
    if config.model.lora_rank is not None:
        return  # adapters continue beside frozen weights, whose fingerprint is compared
    # A run's config.yaml names them; the checkpoint's own weights replace them.
    began = saved.get("config", {}).get("init_from")
    if began is None or Path(began).resolve() != folder.resolve():
        raise UserError(
            f"--init-from {folder} and --resume {resume} both say where weights come from: give "
            "--resume to continue with that run's optimizer, --init-from to start a new run"
        )


def with_recipe(config: RunConfig, saved: "Extra") -> tuple[RunConfig, str]:
    """Return the config with its recipe filled in, and a line that names the recipe's source.

    Args:
        saved: by the run that is resumed. A trained run keeps its own recipe.
    """
    task = task_of(config)
    if "steps" in saved:  # trained here, not imported
        config = fill_as_saved(config, old_names.in_file(saved.get("config", {}), noted=False))
        return config, f"recipe as in the run that is resumed: {described(config.optim)}"
    if saved and task == "training from scratch":  # imported weights
        task = "full fine-tuning"
    config = fill(config, recipe_of(task, config.optim))
    return config, recipe_line(config, task)


def with_saved_micro_batch(config: RunConfig, saved: "Extra", *, world_size: int) -> RunConfig:
    """Return the config with the micro-batch of the run that is resumed, if there is one, and as
    many ranks as there are now can have it."""
    size = saved.get("config", {}).get("micro_batch")
    ranks, batch = config.sharding.data_ranks(world_size), config.data.global_batch or 0
    if size is None or batch % (size * ranks):
        return config
    return config.replace(micro_batch=size)


def _corpus_of(resolved: Resolved) -> Corpus:
    return open_corpus(
        resolved.config.data,
        vocab_size=resolved.model.vocab_size,
        seq_len=resolved.seq_len,
        show_progress=resolved.config.loop.log_level in ("debug", "info"),
    )


def _possible_here(
    config: RunConfig, saved: "Extra", *, world_size: int, ranks_per_node: int
) -> Resolved:
    """Resolve for this machine and its libraries.

    Raises:
        UserError: a choice is invalid, or its library is missing.
    """
    device_type = choose_device(config.loop.device, ranks_per_node)
    resolved = resolve(
        config,
        world_size=world_size,
        device_type=device_type,
        compiled_before=saved.get("config", {}).get("compile"),
    )
    if resolved.config.loop.compiles:
        resolved = with_compilers(resolved)
    if resolved.expandable_segments:
        resolved = dataclasses.replace(resolved, expandable_segments=_segments_may_expand())
    if missing := missing_library(strategy_of(resolved.config)):
        raise UserError(missing)
    return resolved


def with_compilers(resolved: Resolved) -> Resolved:
    """Return the run, uncompiled where `--compile auto` lacks a compiler.

    Raises:
        UserError: `--compile` lacks it.
    """
    from launcher.strategies.compiled import require_compilers

    try:
        require_compilers(resolved.config.loop.device)
    except UserError as error:
        if not resolved.compile_reason:  # --compile is given, not auto
            raise
        config = resolved.config.replace(compile=False)
        return dataclasses.replace(resolved, config=config, compile_reason=f"auto: {error}")
    return resolved


def _budgeted(resolved: Resolved, load_forecast: LoadForecast | None) -> Resolved:
    if load_forecast is None:
        raise UserError(
            f"--activation-checkpointing {resolved.model.activation_checkpointing}: a budget is "
            "divided by the forecast, which this start lacks: name what each block keeps"
        )
    return load_forecast().within_budget(resolved)


def _segments_may_expand() -> bool:
    """Return whether torch can use expandable segments on this process's GPU."""
    from launcher.measure.nvml import names_gpu

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # Slurm can show each rank a single GPU, which is its device 0.
    if names_gpu(local_rank if local_rank < torch.cuda.device_count() else 0):
        return True
    # once per run: our own agent has warned before its ranks start
    if os.environ.get("RANK", "0") == "0" and OWN_AGENT not in os.environ:
        logging.getLogger("shardscale").warning(
            "expandable segments are off: torch needs NVML for them, and NVML does not name the GPU"
        )
    return False


def _reads_for_all(world_size: int, ranks_per_node: int) -> bool:
    """Return whether this process checks every byte of a checkpoint, so that ranks need not:
    torchrun's agent does, or a run's only process.

    On several nodes each would read all of it; there damage shows when ranks load their shards.
    """
    rank = os.environ.get("RANK")
    alone = rank is None or (rank == "0" and OWN_AGENT not in os.environ)
    return alone and world_size == ranks_per_node


def check_init_from(resolved: Resolved) -> None:
    """Check that the weights of `--init-from` are there and fit this run's model.

    Raises:
        UserError: they do not; they lack the masks of `--masks`; they have adapters that the run
            lacks, or no tokenizer; or the run has adapters and no weights.
    """
    folder, masks = resolved.config.model.init_from, resolved.model.masks
    if folder is None:
        if masks:
            raise UserError(
                "--masks holds what shardscale prune has removed: give --init-from a run that it "
                "has made, or leave --masks out"
            )
        lora = resolved.model.lora
        if lora is not None and not resolved.config.model.random_base:
            raise UserError(
                f"--lora-rank {lora.rank} without --init-from trains adapters beside random "
                "weights: give --init-from FOLDER with the weights, or --random-base to measure "
                "memory and speed"
            )
        return
    from launcher.checkpoint.pretrained.stored import check_stays, open_stored

    by = resolved.config.model.decoder
    with naming("--init-from"), open_stored(folder, by) as weights:
        if masks and not weights.config.masks:
            raise UserError(
                f"{folder}: has no masks that --masks could hold: make them with shardscale prune, "
                "or leave --masks out"
            )
        if resolved.model.lora is not None:
            check_stays(weights)
        if weights.config.lora is not None and resolved.model.lora is None:
            raise UserError(
                f"{folder}: has adapters, and this run trains all weights: merge them first with "
                "shardscale export --merge, or give the --lora-rank that they have"
            )
    if resolved.config.data.tokenizer == "bpe":  # it would be trained, and its ids mean other text
        raise UserError(
            f"--init-from {folder}: has no tokenizer.json: give --tokenizer FILE with the one that "
            "its weights were trained with"
        )
