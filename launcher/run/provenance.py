"""Provenance of a resume: what the checkpoint's run was, and how this one may differ from it.

The same weights with another activation or another tokenizer's ids are another model, which is
refused. Other data or another precision is a choice, which is reported. Imported by runs that
resume, or that train adapters.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.extra import Base, Extra, saved_model
from launcher.checkpoint.rank_files import RangeReader
from launcher.checkpoint.store import candidates
from launcher.config import old_names
from launcher.config.recipes import fill_as_saved
from launcher.config.resolve import Resolved
from launcher.config.schema import LoopChoice, RunConfig
from launcher.data import Corpus
from launcher.data.files import TOKENIZER_FILE
from launcher.data.tokenizer import tokenizer_fingerprint
from launcher.optim.registry import checkpointed
from launcher.run.resume import Resume
from launcher.run.same_model import check_model, shown
from launcher.strategies.flat_shards import MASK, PARAM
from launcher.strategies.parameters import trained_shapes
from launcher.util.errors import UserError, naming

# Every field of RunConfig is in one of these or of same_model.py, or changes no number that
# training computes.
REPORTED_OF_MODEL = ("dropout", "window", "attention", "sdpa_backend", "quantize_base")
REPORTED_OF_RUN = (
    *("data", "data_field", "mask_prompt", "document_attention"),
    *("seq_len", "global_batch", "steps", "seed"),
    *("precision", "compensation", "grad_accum_dtype", "optimizer", "moments_dtype"),
    "apollo_rank",
    "lora_dropout",
    *("lr", "schedule", "decay_steps", "min_lr_ratio", "warmup_steps"),
    *("weight_decay", "betas", "eps", "momentum", "clip"),
)


def check_resume(resume: Resume, resolved: Resolved, *, reads_all: bool) -> Checkpoint:
    """Return the newest intact checkpoint to resume from, after checking that this run can.

    Args:
        reads_all: read and check all of its bytes, so that ranks need not.

    Raises:
        DamagedCheckpoint: none is intact.
        UserError: it holds another model or optimizer, or its training is finished.
    """
    source = resume.source
    assert source is not None
    checkpoint = _newest_intact(source, reads_all=reads_all)
    check_model(checkpoint, resolved.model)
    shapes = trained_shapes(resolved.model)
    states, counters = checkpointed(resolved.config.optim, shapes)
    kinds = (PARAM, *states, *((MASK,) if resolved.model.masks else ()))
    checkpoint.check_model(shapes, kinds, counters)
    # in one process; of the ranks, the main one does it (`Saves._fill_base`)
    if reads_all and (problem := same_base(checkpoint, lambda: base_of(resolved))) is not None:
        raise problem
    check_steps(resume, checkpoint.step, resolved.config.loop)
    return checkpoint


def check_steps(resume: Resume, reached: int, loop: LoopChoice) -> None:
    """Refuse a run that has no step left to make; of one that was stopped the test split is left.

    Raises:
        UserError: its training is finished, by the schedule (where its steps are known) or by
            `--stop-after`.
    """
    if resume.reopens and not resume.completed:
        return
    for ends, what, remedy in (
        (loop.steps, "the schedule's last one", "give more --steps or --epochs"),
        (loop.stop_after, "--stop-after", "give a later step, or leave it out"),
    ):
        if ends is not None and reached >= ends:
            raise UserError(
                f"--resume {resume.source}: step {reached} is already reached there, and {what} is "
                f"{ends}: {remedy}"
            )


def _newest_intact(source: Path, *, reads_all: bool) -> Checkpoint:
    """Return the one that loading will take, too, which reports the damaged ones it skips."""
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


def newest_extra(source: Path) -> Extra | None:
    """Return what the newest readable checkpoint records of its run."""
    with naming("--resume"):
        paths = candidates(source)
    for path in paths:
        try:
            return Checkpoint.open(path).extra
        except DamagedCheckpoint:
            continue  # loading reports it
    return None


def base_of(resolved: Resolved) -> Base | None:
    """Identify the weights that a run's adapters are trained beside, reading all of them; None
    without adapters.

    Raises:
        UserError: they are not there, or damaged.
    """
    if resolved.model.lora is None:
        return None
    folder = resolved.config.model.init_from
    if folder is not None:
        from launcher.checkpoint.pretrained.stored import open_stored

        by = resolved.config.model.decoder
        with naming("--init-from"), open_stored(folder, by) as weights:
            return weights.base()
    # A seed gives the same values on one type of device.
    seed, device = resolved.config.loop.seed, resolved.config.loop.device
    return Base(seed=seed, fingerprint=f"seed {seed} on {device}")


def same_base(checkpoint: Checkpoint, find_base: Callable[[], Base | None]) -> UserError | None:
    """Return why a checkpoint's adapters do not fit the weights of this run, or None."""
    try:
        if (base := find_base()) is not None:
            from launcher.checkpoint.pretrained.stored import check_base

            check_base(checkpoint, base)
    except UserError as error:
        return error
    return None


def check_tokenizer(checkpoint: Checkpoint, corpus: Corpus, choice: str) -> None:
    """Refuse another tokenizer than the checkpoint was trained with, where that is known.

    Raises:
        UserError: naming both.
    """
    saved = _tokenizer_of(checkpoint)
    if saved is None or corpus.tokenizer_path is None:
        return
    if saved != tokenizer_fingerprint(corpus.tokenizer_path):
        there = shown(checkpoint.extra.get("config", {}).get("tokenizer", "another"))
        own = checkpoint.run_folder / TOKENIZER_FILE
        fix = own if own.exists() else f"FILE with the {TOKENIZER_FILE} of the run that saved it"
        what = "trained on this run's data" if choice == "bpe" else "which has other token ids"
        raise UserError(
            f"checkpoint {checkpoint.path}: was trained with --tokenizer {there}, and this run has "
            f"--tokenizer {choice}, {what}: give --tokenizer {fix}"
        )


def tokens_of(checkpoint: Checkpoint) -> int:
    """Return the tokens that the starts before a checkpoint have read; 0 if it is imported."""
    config, extra = checkpoint.extra.get("config", {}), checkpoint.extra
    # An older version did not record them.
    by_config = checkpoint.step * (config.get("global_batch") or 0) * (config.get("seq_len") or 0)
    return extra.get("tokens", by_config)


def differences(checkpoint: Checkpoint, resolved: Resolved, corpus: Corpus) -> list[str]:
    """Describe each difference to the run that saved the checkpoint, as `lr 0.001 -> 0.01`."""
    saved, model = checkpoint.extra, saved_model(checkpoint.extra)
    found = []
    if model is not None:
        if model.context < resolved.model.context:
            new = f"positions from {model.context} on are new"
            found.append(f"{_change('context', model.context, resolved.model.context)} ({new})")
        pairs = ((n, getattr(model, n), getattr(resolved.model, n)) for n in REPORTED_OF_MODEL)
        # Before 0.2 a checkpoint did not say what the automatic choice of a kernel was.
        found += [_change(*p) for p in pairs if p[1] != p[2] and p[:2] != ("attention", "auto")]
    if "steps" not in saved:  # imported: no run has trained it
        return found
    # What an older version does not name was then what it is by default now.
    config = old_names.in_file(saved.get("config", {}), noted=False)
    before = fill_as_saved(RunConfig(), config).flat() | _plain(config)
    after = _plain(resolved.config.flat())
    unknown = corpus.tokenizer_path is None or _tokenizer_of(checkpoint) is None
    found += [
        _change(name, before.get(name), after.get(name))
        for name in (*REPORTED_OF_RUN, *(("tokenizer",) if unknown else ()))
        if before.get(name) != after.get(name)
    ]
    tokens = saved.get("corpus", corpus.fingerprint)
    if before.get("data") == after.get("data") and tokens != corpus.fingerprint:
        found.append(f"the text of --data {after['data']}")
    return found


def _tokenizer_of(checkpoint: Checkpoint) -> str | None:
    """Return the fingerprint of its tokenizer's file, before 0.2 of the run's own copy."""
    saved, own = checkpoint.extra.get("tokenizer"), checkpoint.run_folder / TOKENIZER_FILE
    if saved is not None or not own.is_file():
        return saved
    try:
        return tokenizer_fingerprint(own)
    except Exception:  # what the library raises for a damaged file
        return None


def _plain(config: Any) -> dict[str, Any]:
    """Return a config as a checkpoint has it: paths as text, tuples as lists."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def _change(name: str, before: Any, after: Any) -> str:
    return f"{name} {shown(before)} -> {shown(after)}"
