"""Refusals about decoders of transformers: what only our own decoder does."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.optim.registry import OPTIMIZERS


def own_decoder_only(setting: Setting) -> Iterator[str]:
    """Reject techniques that reach into the blocks of our own decoder."""
    model, config = setting.model, setting.config
    if not isinstance(model, ForeignConfig):
        return
    sharding, chosen = config.sharding, model.activation_checkpointing
    whole = model.checkpointing.budget_bytes is None and {"none", "full"}.issuperset(
        model.checkpointing.blocks(model.layers)
    )
    flags = {
        f"--tensor-parallel {sharding.tensor_parallel}": sharding.tensor_parallel > 1,
        f"--context-parallel {sharding.context_parallel}": sharding.context_parallel > 1,
        f"--precision {config.optim.precision}": config.optim.arithmetic.fp8_linears,
        f"--optimizer {config.optim.optimizer}": not OPTIMIZERS[config.optim.optimizer].elementwise,
        sharding.flags_to("nvme"): bool(sharding.flags_to("nvme")),
    }
    for flag, given in flags.items():
        if given:
            yield f"{flag} {_KNOWS_OURS}, and {_computed_by(model)}: leave it out"
    if not whole:
        yield (
            f"--activation-checkpointing {chosen} {_KNOWS_OURS}, and {_computed_by(model)}: use "
            "full, or every=2 for every second block"
        )


_KNOWS_OURS: Final = "knows shardscale's own decoder only"


def _computed_by(model: ForeignConfig) -> str:
    return f"{model.computed_by} computes this model"


def documents(setting: Setting) -> Iterator[str]:
    """Reject --document-attention where states or masks of a decoder go from one document to the
    next."""
    model = setting.model
    if not (setting.config.data.document_attention and isinstance(model, ForeignConfig)):
        return
    from launcher.model.foreign.reading import separates_documents

    if USERS in model.fields or not separates_documents(model):
        yield (
            f"--document-attention: {model.computed_by} has no mask of documents, or carries a "
            "state from one to the next: leave it out"
        )


def users_write_nothing(setting: Setting) -> Iterator[str]:
    """Reject samples of a user's decoder, whose forward has no cache."""
    model, every = setting.model, setting.config.loop.sample_every
    if every and isinstance(model, ForeignConfig) and USERS in model.fields:
        yield (
            f"--sample-every {every} needs a cache of keys and values, which {model.computed_by} "
            "does not take: leave it out"
        )


RULES: Final[tuple[Rule, ...]] = (own_decoder_only, documents, users_write_nothing)
