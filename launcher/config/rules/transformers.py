"""Refusals about decoders of transformers: what only our own decoder does."""

import math
from collections.abc import Callable, Iterator
from typing import Final

from launcher.config.rules import Setting
from launcher.model.checkpointing import NAMES
from launcher.model.config_checks import FP8_MULTIPLE
from launcher.model.foreign.config import USERS, ForeignConfig


def named_products(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject names of single products, and budgets that choose among those of our own block."""
    budget = model.checkpointing.budget_bytes is not None
    if budget or not set(NAMES).issuperset(model.checkpointing.blocks(model.layers)):
        yield (
            f"--activation-checkpointing {model.activation_checkpointing} {_KNOWS_OURS}, and "
            f"{_computed_by(model)}: use selective, full, or every=2 for every second block"
        )


_KNOWS_OURS: Final = "knows shardscale's own decoder only"
_INNER: Final = "inner."


def _computed_by(model: ForeignConfig) -> str:
    return f"{model.computed_by} computes this model"


def context_parallel(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject --context-parallel where more than attention goes from token to token."""
    config = setting.config
    ranks = config.sharding.context_parallel
    if ranks == 1:
        return
    from launcher.model.foreign.attention import attention_obstacle

    flag, whose = f"--context-parallel {ranks}", _computed_by(model)
    if (reason := attention_obstacle(model)) is not None:
        yield (
            f"{flag} lets attention alone see other ranks' tokens, and {model.computed_by} "
            f"{reason}: leave it out"
        )
    if model.heads % ranks or model.kv_head_count % ranks:
        fitting = math.gcd(model.heads, model.kv_head_count, ranks)
        yield (
            f"{flag} gives each rank as many heads, and {model.heads} heads with "
            f"{model.kv_head_count} of keys do not divide: "
            + (f"use --context-parallel {fitting}" if fitting > 1 else "leave it out")
        )
    if config.sharding.context_parallel_method == "ring":
        yield f"--context-parallel-method ring {_KNOWS_OURS}, and {whose}: use ulysses"
    if model.router_loss:
        yield (
            f"{flag}: {model.computed_by} has a router loss over whole sequences: set "
            "output_router_logits to false in its config, or leave the flag out"
        )
    if config.data.document_attention:
        yield f"{flag} with --document-attention {_KNOWS_OURS}, and {whose}: leave one out"


def rounded_linears(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject products in fp8 for a decoder none of whose linear layers can have them."""
    config = setting.config
    if not config.optim.arithmetic.fp8_linears:
        return
    from launcher.model.foreign.decoder import skeleton
    from launcher.model.linears import fp8_linears

    if not fp8_linears(skeleton(model.document, model.attention)):
        yield (
            f"--precision {config.optim.precision} multiplies matrices in tiles of {FP8_MULTIPLE}, "
            f"and no linear layer of {model.computed_by} has such sizes: use --precision bf16"
        )


def tensor_parallel(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject --tensor-parallel where transformers plans no shards of matrices that compute the
    same."""
    config = setting.config
    number = config.sharding.tensor_parallel
    if number == 1:
        return
    from launcher.model.foreign.matrix_check import matrix_obstacle

    flag = f"--tensor-parallel {number}"
    if (reason := matrix_obstacle(model, number)) is not None:
        yield (
            f"{flag} shards matrices, and {model.computed_by} {reason}: leave it out, and shard "
            "parameters by --strategy fsdp or --zero 3"
        )
    if config.sharding.context_parallel > 1:
        yield (
            f"{flag} with --context-parallel {config.sharding.context_parallel} {_KNOWS_OURS}, and "
            f"{_computed_by(model)}: leave one out"
        )


def documents(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject --document-attention where states or masks of a decoder go from one document to the
    next."""
    if not setting.config.data.document_attention:
        return
    from launcher.model.foreign.reading import separates_documents

    if USERS in model.fields or not separates_documents(model):
        yield (
            f"--document-attention: {model.computed_by} has no mask of documents, or carries a "
            "state from one to the next: leave it out"
        )


def shared_parameters(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject FSDP where a user's blocks share parameters, since it shards block by block."""
    if setting.config.sharding.strategy != "fsdp" or USERS not in model.fields:
        return
    from launcher.model.foreign.decoder import skeleton
    from launcher.model.parts import block_of

    first: dict[object, str] = {}
    found = skeleton(model.document, model.attention).named_parameters(remove_duplicate=False)
    for name, parameter in found:
        if block_of(other := first.setdefault(parameter, name)) != block_of(name):
            yield (
                f"--strategy fsdp shards block by block, and {name.removeprefix(_INNER)} of "
                f"{model.computed_by} is {other.removeprefix(_INNER)}, too: use --strategy ddp or "
                "--zero 3, or go through the list of blocks several times"
            )
            return


def users_write_nothing(setting: Setting, model: ForeignConfig) -> Iterator[str]:
    """Reject samples of a user's decoder, whose forward has no cache."""
    every = setting.config.loop.sample_every
    if every and USERS in model.fields:
        yield (
            f"--sample-every {every} needs a cache of keys and values, which {model.computed_by} "
            "does not take: leave it out"
        )


RULES: Final[tuple[Callable[[Setting, ForeignConfig], Iterator[str]], ...]] = (
    *(named_products, context_parallel, tensor_parallel, rounded_linears, documents),
    *(shared_parameters, users_write_nothing),
)
