"""What a run adds to its checkpoints, so that their numbers keep their meaning."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from launcher.checkpoint.document import Count
from launcher.config.model import ModelChoice
from launcher.config.schema import field_types
from launcher.model.config import ModelConfig
from launcher.strategies.engine import LossScale

_OPEN = {"extra": "allow", "allow_inf_nan": False}

if TYPE_CHECKING:
    SavedConfig = Mapping[str, Any]
else:
    SavedConfig = TypedDict("SavedConfig", dict(field_types()), total=False)  # noqa: UP013
    SavedConfig.__pydantic_config__ = _OPEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Weights that adapters were trained beside, and that no checkpoint of them has."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    path: str | None = None
    """Folder of a model of transformers, or a checkpoint; None where a seed gives them."""
    seed: int | None = None
    fingerprint: Annotated[str, MinLen(1)]
    """Of their content."""


class Extra(TypedDict, total=False):
    """Known entries have these types. Others are kept and not looked at: later versions add some,
    and who saves without a run adds none."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]  # where pydantic looks

    config: SavedConfig
    """RunConfig, flat; what is not in it was not given."""
    model: ModelConfig
    """The model with every choice made; since 0.2."""
    tokenizer: Annotated[str, MinLen(1)]
    """Fingerprint of the tokenizer whose ids the model knows; since 0.2."""
    base: Base
    """What is beside the adapters; only where the model has some."""
    pruned: Mapping[str, Any]
    """What was removed, how, and of which weights; only of what shardscale prune has made."""
    corpus: Annotated[str, MinLen(1)]
    """Fingerprint of the tokens it was trained on; since 0.2."""
    steps: Count
    """Length of the schedule."""
    skipped_steps: Count
    loss_scale: LossScale | None
    by_clock: bool
    """Of --save-minutes: the next checkpoint replaces it."""


def saved_model(extra: Extra) -> ModelConfig | None:
    """The model that was saved; None where nothing says which.

    Raises:
        UserError: there is no such model.
    """
    model, config = extra.get("model"), extra.get("config")
    if model is not None or config is None:
        return model
    names = {field.name for field in dataclasses.fields(ModelChoice)} & config.keys()
    return ModelChoice(**{name: config[name] for name in names}).build()
