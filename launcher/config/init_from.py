"""`--init-from`: adopt the shape and tokenizer of the model whose weights a run starts with."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.model import CHANGES_ADAPTERS, LORA, ModelChoice, adapter_flags
from launcher.config.schema import RunConfig
from launcher.config.transformers_config import (
    TOKENIZER,
    DecoderChoice,
    decoder_of,
    is_function,
    names_config,
    require_transformers,
)
from launcher.model.config import WHAT_IT_COMPUTES, ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.sizes import CUSTOM, NAMED, named
from launcher.util.errors import UserError, naming, refused
from launcher.util.files import run_folder_of
from launcher.util.flags import as_flags, flag
from launcher.util.hub_cache import HUB_PREFIX

HF_CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
_RUN_CONFIG = "config.yaml"
_OLDER_TOKENIZERS = ("vocab.json", "tokenizer.model")
"""Files that transformers wrote before tokenizer.json."""


ReadConfig = Callable[[Path], Mapping[str, Any]]
"""Reads a file of `--config`: its fields, typed and checked."""


def adopt(config: RunConfig, given: Collection[str], read_config: ReadConfig) -> RunConfig:
    """Return the config with the model of its `--init-from`, and that model's tokenizer unless
    another one is given.

    Args:
        given: the fields that flags or `--config` have set.

    Raises:
        UserError: the folder holds no model, or `given` asks for another.
    """
    folder = config.model.init_from
    assert folder is not None
    if config.model.lora_rank is None and not folder.exists() and _has_saved(config):
        return config.replace(init_from=None)
    with naming("--init-from"):
        if is_function(config.model.decoder):
            raise UserError(
                f"{folder}: --decoder {config.model.decoder} has initial values of its own: leave "
                "--init-from out"
            )
        model, words = _model_in(folder, read_config, config.model.decoder)
    _check_adapters(config, model, given)
    _check_shape(config.model, model, words, named_by_user="model" in given)
    kept = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(config.model)}
    fields = {name: value for name, value in kept.items() if value is not None}
    fields = {name: fields[name] for name in fields if name not in ("model", "decoder")}
    if model.lora is not None:
        # the folder's adapters and their base, not the defaults of flags that are not given
        for name in {*LORA, "quantize_base"}.difference(given):
            fields.pop(name, None)
    changes: dict[str, Any] = words | fields
    if "context" in fields and "window" not in fields:
        changes["window"] = _window_at(fields["context"], folder, model, config.model.decoder)
    if config.data.tokenizer == "bpe" and (found := _tokenizer_in(folder, read_config)) is not None:
        changes["tokenizer"] = found
    return config.replace(**changes)


def _has_saved(config: RunConfig) -> bool:
    """Return whether a run resumes from weights of its own: what it began with may be gone."""
    out, resume = config.loop.out, config.loop.resume
    if resume != Path("auto"):
        return resume is not None
    return out is not None and any((out / "checkpoints").glob("step-*"))


def _model_in(
    folder: Path, read_config: ReadConfig, by: DecoderChoice
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model of a folder of transformers, a run folder or one of its checkpoints, and the
    fields of RunConfig that say it.

    Args:
        by: whose code computes a folder of transformers.

    Raises:
        UserError: there is none, or one that no decoder computes.
    """
    if (folder / HF_CONFIG).is_file():
        with naming(f"{folder}:"):
            model = decoder_of(folder / HF_CONFIG, by, {})
        return model, _words(model, f"{HUB_PREFIX}{folder}")
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder}: is an adapter of PEFT: make a run folder of it with shardscale import, and "
            "give that one"
        )
    run = run_of(folder)
    if run is None:
        what = "holds no config.json and no config.yaml" if folder.is_dir() else "is no folder"
        raise UserError(
            f"{folder}: {what}, give a folder that transformers' save_pretrained has written, a "
            f"run folder, or {HUB_PREFIX}ORG/NAME"
        )
    fields = read_config(run / _RUN_CONFIG)
    names = {f.name for f in dataclasses.fields(ModelChoice)} & fields.keys()
    choice = ModelChoice(**{name: fields[name] for name in names})
    model = choice.build()
    require_transformers(model, f"{folder}: what reads a run's weights")
    words = _words(model, choice.model)
    # a run of our own decoder says auto
    if by not in ("auto", decoder := words["decoder"] if words["decoder"] != "auto" else "own"):
        raise UserError(
            f"{folder}: was trained with --decoder {decoder}, whose weights have other names than "
            f"those of --decoder {by}: leave that out"
        )
    return model, words


def _words(model: ModelConfig, name: str) -> dict[str, Any]:
    """Return a model as fields of RunConfig; `name` is that of its config, for `--model`."""
    own = not isinstance(model, ForeignConfig)
    shape = in_words(model) if own else {"model": name, **adapter_flags(model.lora)}
    decoder = "auto" if own else "transformers"
    return {**shape, "decoder": decoder, "quantize_base": model.quantize_base}


def in_words(model: ModelConfig) -> dict[str, Any]:
    """Return a model as fields of RunConfig: the named size that computes the same, if any, and
    every dimension."""
    own = model.computes()
    fields = {**own, "window": model.window, "dropout": model.dropout}
    alike = (n for n, m in NAMED.items() if m.computes() == own and m.window == model.window)
    spelled = {name: value for name, value in fields.items() if value is not None}
    masks = {"masks": True} if model.masks else {}
    return {"model": next(alike, CUSTOM), **spelled, **adapter_flags(model.lora), **masks}


def _check_shape(
    choice: ModelChoice, model: ModelConfig, words: Mapping[str, Any], *, named_by_user: bool
) -> None:
    """Reject `--model` and dimensions that differ from those of the weights."""
    own, folder = model.computes(), choice.init_from
    foreign = isinstance(model, ForeignConfig)
    if choice.model != words["model"] and (
        names_config(choice.model) or (foreign and named_by_user)
    ):
        raise UserError(
            f"--model {choice.model} with --init-from {folder}: the folder brings its own shape: "
            "leave --model out"
        )
    if foreign:
        return  # whose dimensions are no flags
    given = {name: getattr(choice, name) for name in WHAT_IT_COMPUTES}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if value != own[name] and not _is_limit(name, model):
            raise UserError(
                f"{flag(name)} {value} differs from --init-from {folder}, which has "
                f"{as_flags({name: own[name]})}: leave it out"
            )
    if not named_by_user or choice.model == CUSTOM:
        return
    with refused(ValueError):
        theirs = named(choice.model, **given).computes()
    differing = [
        name for name in theirs if theirs[name] != own[name] and not _is_limit(name, model)
    ]
    if differing:
        here, there = (as_flags({name: one[name] for name in differing}) for one in (theirs, own))
        raise UserError(
            f"--model {choice.model} ({here}) differs from --init-from {folder} ({there}): leave "
            "--model out, or give a folder of that model"
        )


def _window_at(context: int, folder: Path, model: ModelConfig, by: DecoderChoice) -> int | None:
    """Return a model's window at another context: None where it hides nothing there."""
    if (folder / HF_CONFIG).is_file() and not isinstance(model, ForeignConfig):
        return decoder_of(folder / HF_CONFIG, by, {"context": context}).window
    return None if model.window is None or model.window >= context - 1 else model.window


def _check_adapters(config: RunConfig, model: ModelConfig, given: Collection[str]) -> None:
    """Reject flags of other adapters than those that the folder holds."""
    if model.lora is None:
        return
    rank = config.model.lora_rank or model.lora.rank
    asked = dataclasses.replace(config.model, lora_rank=rank).build_lora()
    own, other = adapter_flags(model.lora), adapter_flags(asked)
    changed = [name for name in CHANGES_ADAPTERS if name in given and own[name] != other[name]]
    if changed:
        here, there = (as_flags({name: one[name] for name in changed}) for one in (other, own))
        raise UserError(
            f"{here} differs from --init-from {config.model.init_from}, whose adapters have "
            f"{there}: leave it out, or merge them first with shardscale export --merge"
        )


def run_of(folder: Path) -> Path | None:
    """Return the run folder of a run folder or of one of its checkpoints."""
    places = (folder, run_folder_of(folder))
    return next((place for place in places if (place / _RUN_CONFIG).is_file()), None)


def _is_limit(name: str, model: ModelConfig) -> bool:
    # Rotary positions have no parameters: another context needs no other weights.
    return name == "context" and model.position == "rope"


def tokenizer_in(folder: Path) -> str | None:
    """Return the tokenizer of a folder of transformers, if it has one."""
    if (folder / TOKENIZER).is_file():
        return str(folder / TOKENIZER)
    older = any((folder / name).is_file() for name in _OLDER_TOKENIZERS)
    return f"{HUB_PREFIX}{folder.absolute()}" if older else None


def _tokenizer_in(folder: Path, read_config: ReadConfig) -> str | None:
    run = run_of(folder)
    for place in (folder, run):
        if place is not None and (found := tokenizer_in(place)) is not None:
            return found
    if run is None:
        return None
    named: str | None = read_config(run / _RUN_CONFIG).get("tokenizer")
    return None if named == "bpe" else named
