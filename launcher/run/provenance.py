"""What gives a checkpoint's numbers their meaning, and how a run that goes on may differ from it.

The same numbers under another activation, or fed with another tokenizer's ids, are another model:
refused. Other data or another precision is a choice that somebody makes: said.
"""

import json
from pathlib import Path
from typing import Any

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.extra import Extra, saved_model
from launcher.checkpoint.store import candidates
from launcher.config.model import CHANGES_ADAPTERS, adapter_flags
from launcher.config.recipes import (
    described,
    fill,
    fill_as_saved,
    recipe_line,
    recipe_of,
    task_of,
)
from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.data import Corpus
from launcher.data.files import TOKENIZER_FILE
from launcher.data.tokenizer import tokenizer_fingerprint
from launcher.model.config import WHAT_IT_COMPUTES, ModelConfig
from launcher.util.errors import UserError
from launcher.util.flags import as_flags, flag

# Every field of RunConfig is in one of these, or changes no number that training computes.
CHANGES_THE_FUNCTION = WHAT_IT_COMPUTES
SAID_OF_THE_MODEL = ("dropout", "window", "attention", "sdpa_backend", "quantize_base")
LONGEST_SHOWN = 400
_FOLLOW = ("kv_heads", "head_dim", "qkv_bias")
SAID_OF_THE_RUN = (
    *("data", "data_field", "data_stream", "mask_prompt", "document_attention"),
    *("seq_len", "global_batch", "steps", "seed"),
    *("precision", "compensation", "tf32", "grad_accum_dtype", "optimizer", "moments_dtype"),
    "apollo_rank",
    "lora_dropout",
    *("lr", "schedule", "decay_steps", "min_lr_ratio", "warmup_steps", "warmup_ratio"),
    *("weight_decay", "betas", "eps", "momentum", "clip"),
)


def meaning(resolved: Resolved, corpus: Corpus) -> Extra:
    """What a checkpoint says of the run that saves it."""
    found: Extra = {
        "config": resolved.config.flat(),
        "model": resolved.model,
        "corpus": corpus.fingerprint,
        "steps": resolved.steps,
    }
    if corpus.tokenizer_path is not None:
        found["tokenizer"] = tokenizer_fingerprint(corpus.tokenizer_path)
    return found


def with_recipe(config: RunConfig, source: Path | None) -> tuple[RunConfig, str]:
    """Return the config with its recipe filled in, and a line that says where it comes from.

    Args:
        source: what the run is resumed from, if anything. A trained run keeps its own recipe.
    """
    task = task_of(config)
    saved = None if source is None else _newest_extra(source)
    if saved is not None and "steps" in saved:
        config = fill_as_saved(config, saved.get("config", {}))
        return config, f"recipe as in the run that is resumed: {described(config.optim)}"
    if saved is not None and task == "training from scratch":  # imported weights
        task = "full fine-tuning"
    config = fill(config, recipe_of(task, config.optim))
    return config, recipe_line(config, task)


def _newest_extra(source: Path) -> Extra | None:
    for path in candidates(source):
        try:
            return Checkpoint.open(path).extra
        except DamagedCheckpoint:
            continue  # loading says so
    return None


def check_model(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """The model computes what the checkpoint's does, if that is known.

    Raises:
        UserError: it computes something else with the same weights, or has others.
    """
    saved = saved_model(checkpoint.extra)
    if saved is None:
        return
    before, after = saved.computes(), model.computes()
    changed = [
        name
        for name in CHANGES_THE_FUNCTION
        if before[name] != after[name]
        # What follows from heads and width is not said again.
        and not (name in _FOLLOW and getattr(saved, name) is getattr(model, name) is None)
    ]
    if saved.context < model.context:  # what it computes up to there is the same
        changed.remove("context")
    for values, one in ((before, saved), (after, model)):
        own = adapter_flags(one.lora)
        values |= {name: own.get(name) for name in CHANGES_ADAPTERS} | {"masks": one.masks}
    of_training = (*CHANGES_ADAPTERS, "masks")
    changed += [name for name in of_training if before[name] != after[name]]
    if changed:
        there, here = (
            as_flags({name: one[name] for name in changed if one[name] is not None})
            or f"no {flag(changed[0])}"
            for one in (before, after)
        )
        raise UserError(
            f"checkpoint {checkpoint.path}: holds a model of {there}, and this run's is of {here}: "
            f"give the same model flags as for the run that saved it, {there}"
        )


def check_tokenizer(checkpoint: Checkpoint, corpus: Corpus, choice: str) -> None:
    """The run's token ids mean the text that they meant to the checkpoint, if that is known.

    Raises:
        UserError: they mean something else.
    """
    saved = _tokenizer_of(checkpoint)
    if saved is None or corpus.tokenizer_path is None:
        return
    if saved != tokenizer_fingerprint(corpus.tokenizer_path):
        there = _shown(checkpoint.extra.get("config", {}).get("tokenizer", "another"))
        own = _own_tokenizer(checkpoint)
        fix = own if own.exists() else f"FILE with the {TOKENIZER_FILE} of the run that saved it"
        what = "trained on this run's data" if choice == "bpe" else "which has other token ids"
        raise UserError(
            f"checkpoint {checkpoint.path}: was trained with --tokenizer {there}, and this run has "
            f"--tokenizer {choice}, {what}: give --tokenizer {fix}"
        )


def differences(checkpoint: Checkpoint, resolved: Resolved, corpus: Corpus) -> list[str]:
    """What a run that goes on does otherwise than the one that saved, as `lr 0.001 -> 0.01`."""
    saved, model = checkpoint.extra, saved_model(checkpoint.extra)
    found = []
    if model is not None:
        if model.context < resolved.model.context:
            new = f"positions from {model.context} on are new"
            found.append(f"{_change('context', model.context, resolved.model.context)} ({new})")
        pairs = ((n, getattr(model, n), getattr(resolved.model, n)) for n in SAID_OF_THE_MODEL)
        # Before 0.2 a checkpoint did not say what the automatic choice of a kernel was.
        found += [_change(*p) for p in pairs if p[1] != p[2] and p[:2] != ("attention", "auto")]
    if "steps" not in saved:  # imported: no run has trained it
        return found
    # What an older version does not name was then what it is by default now.
    config = saved.get("config", {})
    before = fill_as_saved(RunConfig(), config).flat() | _plain(config)
    after = _plain(resolved.config.flat())
    unknown = corpus.tokenizer_path is None or _tokenizer_of(checkpoint) is None
    found += [
        _change(name, before.get(name), after.get(name))
        for name in (*SAID_OF_THE_RUN, *(("tokenizer",) if unknown else ()))
        if before.get(name) != after.get(name)
    ]
    tokens = saved.get("corpus", corpus.fingerprint)
    if before.get("data") == after.get("data") and tokens != corpus.fingerprint:
        found.append(f"the text of --data {after['data']}")
    return found


def _tokenizer_of(checkpoint: Checkpoint) -> str | None:
    """Before 0.2 only the run's own copy tells; a tokenizer without a file has no fingerprint."""
    saved, own = checkpoint.extra.get("tokenizer"), _own_tokenizer(checkpoint)
    if saved is not None or not own.is_file():
        return saved
    try:
        return tokenizer_fingerprint(own)
    except Exception:  # what the library raises for a damaged file
        return None


def _own_tokenizer(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.absolute().parent.parent / TOKENIZER_FILE


def _plain(config: Any) -> dict[str, Any]:
    """Values as they compare, and as a checkpoint has them: a path is text, a tuple a list."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def _change(name: str, before: Any, after: Any) -> str:
    return f"{name} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    """A value for a sentence; what a checkpoint says may be anybody's text."""
    text = "not given" if value is None else str(value)
    return (text if text.isprintable() else ascii(text))[:LONGEST_SHOWN]
