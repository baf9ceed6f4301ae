"""Entries of a checkpoint that describe the run which saved it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from launcher.checkpoint.document import Count
from launcher.config import old_names
from launcher.config.model import ModelChoice
from launcher.config.schema import field_types
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.strategies.engine import LossScale

_OPEN = {"extra": "allow", "allow_inf_nan": False}

if TYPE_CHECKING:
    SavedConfig = Mapping[str, Any]
else:
    SavedConfig = TypedDict("SavedConfig", dict(field_types()), total=False)  # noqa: UP013
    SavedConfig.__pydantic_config__ = _OPEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Identity of the weights beside which adapters were trained; their checkpoint lacks them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    path: str | None = None
    """Folder of a model of transformers, or a checkpoint; None where a seed gives them."""
    seed: int | None = None
    fingerprint: Annotated[str, MinLen(1)]
    """Hash of their content."""


class Extra(TypedDict, total=False):
    """Known entries and their types. Others are kept unchecked, since later versions add some; all
    are optional, for saves without a run."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]  # where pydantic looks

    config: SavedConfig
    """RunConfig, flat; missing fields have their defaults."""
    model: ForeignConfig | ModelConfig
    """The model with every choice made; since 0.2."""
    tokenizer: Annotated[str, MinLen(1)]
    """Fingerprint of the tokenizer whose ids the model knows; since 0.2."""
    base: Base
    """Weights beside the adapters, if the model has any."""
    dtype: Annotated[str, MinLen(1)]
    """Name in config.json for the dtype of the weights that the run began with."""
    hidden_window: Count
    """Window of the imported model, where its context is too short for it to hide a token."""
    pruned: Mapping[str, Any]
    """Report of shardscale prune, if it made the checkpoint."""
    corpus: Annotated[str, MinLen(1)]
    """Fingerprint of the tokens it was trained on; since 0.2."""
    steps: Count
    """Length of the schedule."""
    tokens: Count
    """Read so far, by all starts."""
    skipped_steps: Count
    loss_scale: LossScale | None
    by_clock: bool
    """Saved by --save-minutes: the next checkpoint replaces it."""


def saved_model(extra: Extra) -> ModelConfig | None:
    """Return the saved model, or None if the checkpoint does not record it.

    Raises:
        UserError: the record is no valid model.
    """
    model, config = extra.get("model"), extra.get("config")
    if model is not None or config is None:
        return model
    config = old_names.in_file(config, noted=False)
    names = {field.name for field in dataclasses.fields(ModelChoice)} & config.keys()
    return ModelChoice(**{name: config[name] for name in names}).build()
