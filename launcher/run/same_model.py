"""Refusal of a resume whose model computes another function than the checkpoint's."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.extra import saved_model
from launcher.config.model import CHANGES_ADAPTERS, adapter_flags
from launcher.model.config import WHAT_IT_COMPUTES, ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.util.errors import LONGEST_WORD, MOST_CHARACTERS, UserError
from launcher.util.flags import as_flags, flag

CHANGES_THE_FUNCTION = WHAT_IT_COMPUTES
LONGEST_SHOWN = 400
FIRST_FLAGS = 4
"""Flags named of more than a sentence has room for."""
_FOLLOW = ("kv_heads", "head_dim")


def check_model(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Refuse a model that computes another function than the checkpoint's, where that is known.

    Raises:
        UserError: naming the flags of both.
    """
    saved = saved_model(checkpoint.extra)
    if saved is None:
        return
    check_document(checkpoint, saved, model)
    before, after = saved.computes(), model.computes()
    changed = [
        name
        for name in CHANGES_THE_FUNCTION
        if before[name] != after[name]
        # Consequences of heads and width are not named again.
        and not (name in _FOLLOW and getattr(saved, name) is getattr(model, name) is None)
    ]
    if saved.context < model.context:  # what it computes up to there is the same
        changed.remove("context")
        window = checkpoint.extra.get("hidden_window")
        if window is not None and window < model.context - 1 and model.window is None:
            raise UserError(
                f"checkpoint {checkpoint.path}: its model has a window that hides nothing at its "
                f"--context {saved.context}, and does at {model.context}: give --window {window}"
            )
    for values, one in ((before, saved), (after, model)):
        own = adapter_flags(one.lora)
        values |= {name: own.get(name) for name in CHANGES_ADAPTERS} | {"masks": one.masks}
    of_training = (*CHANGES_ADAPTERS, "masks")
    changed += [name for name in of_training if before[name] != after[name]]
    if changed:
        raise UserError(_other_model(checkpoint, changed, before, after))


def _other_model(
    checkpoint: Checkpoint,
    changed: Sequence[str],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> str:
    """Describe the fields in which two models differ, in a sentence that is not cut."""
    there, here = (
        as_flags({name: one[name] for name in changed if one[name] is not None})
        or f"no {flag(changed[0])}"
        for one in (before, after)
    )
    sentence = (
        f"checkpoint {checkpoint.path}: holds a model of {there}, and this run's is of {here}: "
        "give the same model flags as for the run that saved it"
    )
    # Of a longer one the path is shortened first, which is no part of the remedy.
    if len(sentence) - max(0, len(str(checkpoint.path)) - LONGEST_WORD) <= MOST_CHARACTERS:
        return sentence
    names = f"{', '.join(map(flag, changed[:2]))} and {len(changed) - 2} other flags"
    sentence = f"checkpoint {checkpoint.path.name}: holds another model than this run's, by {names}"
    file = checkpoint.run_folder / "config.yaml"
    if file.is_file():
        return f"{sentence}: give --config {file} of the run that saved it"
    values = [(name, before[name]) for name in changed if before[name] is not None]
    more = len(values) - FIRST_FLAGS
    rest = f", and {more} more of extra.config in its index.json" if more > 0 else ""
    return f"{sentence}: give {as_flags(dict(values[:FIRST_FLAGS]))}{rest}"


def check_document(checkpoint: Checkpoint, saved: ModelConfig, model: ModelConfig) -> None:
    """Refuse another config.json than that of the checkpoint's decoder of transformers.

    Raises:
        UserError: naming the first field that differs.
    """
    before, after = (one.fields if isinstance(one, ForeignConfig) else {} for one in (saved, model))
    if bool(before) != bool(after):
        there, here = ("transformers" if one else "own" for one in (before, after))
        raise UserError(
            f"checkpoint {checkpoint.path}: was trained with --decoder {there}, whose weights have "
            f"other names, and this run has --decoder {here}: give --decoder {there}"
        )
    differing = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    if differing:
        name = differing[0]
        raise UserError(
            f"checkpoint {checkpoint.path}: was trained with {name} "
            f"{shown(before.get(name))} in its config.json, and this run's has "
            f"{shown(after.get(name))}: give the config.json of the run that saved it"
        )


def shown(value: Any) -> str:
    """Return a value for a sentence; a checkpoint may hold arbitrary text."""
    text = "not given" if value is None else str(value)
    return (text if text.isprintable() else ascii(text))[:LONGEST_SHOWN]
