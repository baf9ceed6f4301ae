"""Candidates: every way to run a model on a number of ranks that is worth predicting."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from launcher.config.deepspeed_file import adopted_fields
from launcher.config.resolve import Resolved, resolve
from launcher.config.rules import default_seq_len
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.forecast.budget import within_budget
from launcher.model.checkpointing import parse
from launcher.strategies import STRATEGIES, VARIANTS, strategy_of, variant_of
from launcher.strategies.base import unknown_versions
from launcher.util.errors import UserError
from launcher.util.flags import fields_of

LARGEST_MICRO_BATCH: Final = 128  # tried where no global batch bounds it
LONG_SEQUENCE: Final = 8192
"""Sequence length from which context parallelism is tried; below, a smaller micro-batch saves as
much."""
WIDE_MODEL: Final = 4096
"""Model width from which tensor parallelism is tried; narrower layers compute faster than they
communicate."""
_CONTEXT, _TENSOR = "context", "tensor"
_EACH: Final = "+each"  # label of candidates that reduce gradients in each micro-batch
PRECISIONS: Final = ("bf16", "fp32")
Changes = dict[str, Any]
CHECKPOINTING: Final = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One candidate: sharding, precision and checkpointing, with every possible micro-batch."""

    label: str
    precision: str
    checkpointing: str
    runs: tuple[Resolved, ...]
    """By ascending micro-batch; at least one."""
    unbounded: RunConfig | None = None
    """The config, where larger micro-batches than those of `runs` are possible."""


def choices(
    config: RunConfig,
    fixed: Set[str],
    *,
    world_size: int,
    ranks_per_node: int,
    device_type: str,
    precisions: Sequence[str] = PRECISIONS,
) -> list[Choice]:
    """Return all valid combinations that keep the fields in `fixed` as they are in `config`.

    Raises:
        UserError: there is none; with the reason of the last one tried, of torch's own if any.
    """
    found: dict[RunConfig, Choice] = {}
    problem: UserError | None = None
    combinations = list(_combinations(config, fixed, world_size, ranks_per_node, precisions))
    as_given = not combinations  # explicit flags that no candidate has: plan them as they are
    if as_given:
        names = ("precision", "activation_checkpointing")
        given = {name: config.flat()[name] for name in names}
        auto = config.optim.precision == "auto"  # the first that goes with the flags
        tried = precisions if auto else (config.optim.precision,)
        combinations = [("", given | {"precision": precision}) for precision in tried]
    for suffix, changes in combinations:
        if as_given and found:
            break
        try:
            runs = _runs(config.replace(**changes), fixed, world_size, device_type)
            if unknown := unknown_versions(strategy_of(runs[0].config)):
                raise UserError(unknown)
        except UserError as error:
            strategy = STRATEGIES.get(changes.get("strategy", ""))
            # What a library refuses is no reason to who has not asked for it.
            if problem is None or strategy is None or [*strategy.follows] == ["torch"]:
                problem = error
            continue
        if suffix.startswith(_EACH):
            runs = tuple(run for run in runs if run.accumulation > 1)
            if not runs:  # no accumulation: the same as without
                continue
        bounded = "micro_batch" in fixed or config.data.global_batch is not None
        # Fixed fields may turn one variant into another: of equal candidates keep the last, whose
        # label says most.
        found[runs[0].config] = Choice(
            label=variant_of(runs[0].config).label + suffix,
            precision=changes["precision"],
            checkpointing=changes["activation_checkpointing"],
            runs=runs,
            unbounded=None if bounded else config.replace(**changes),
        )
    if not found:
        assert problem is not None
        raise problem
    return list(found.values())


def given_fields(argv: Collection[str], config: RunConfig) -> set[str]:
    """Return the fields that the user has set: on the command line, or not at their default."""
    default = RunConfig().flat()
    changed = {name for name, value in config.flat().items() if default.get(name) != value}
    fields = {
        field.name
        for section in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, section.name))
    }
    given = (fields_of(argv) & fields) | changed | adopted_fields(config.sharding.deepspeed)
    given -= {"precision"} if config.optim.precision == "auto" else set()
    return given - {"micro_batch"} if isinstance(config.data.micro_batch, AutoMicroBatch) else given


def _combinations(
    config: RunConfig,
    fixed: Set[str],
    world_size: int,
    ranks_per_node: int,
    precisions: Sequence[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    flat = config.flat()
    if "precision" in fixed:
        precisions = (config.optim.precision,)
    modes: Sequence[str] = CHECKPOINTING
    if "activation_checkpointing" in fixed:
        modes = (config.model.activation_checkpointing,)
    asked = bool(fixed & {"strategy", "zero"})
    shardings = _shardings(world_size, ranks_per_node, asked=asked)
    cuts = _cuts(config, world_size, ranks_per_node)
    for (suffix, changes), (dimension, cut), precision, checkpointing in product(
        shardings, cuts, precisions, modes
    ):
        if dimension == _TENSOR and (suffix or not _goes_with_tensor(changes)):
            continue
        if "zero" in fixed and changes.get("zero") != config.sharding.zero:
            continue
        if suffix == _EACH and config.sharding.reduce_each_micro_batch:
            continue  # all candidates do
        choice = changes | {"precision": precision, "activation_checkpointing": checkpointing}
        if cut > 1:
            suffix = f"{suffix}-{dimension}{cut}"
            choice[f"{dimension}_parallel"] = cut
        # A fixed field that this sharding leaves alone keeps the user's value.
        if all(flat.get(name, choice[name]) == choice[name] for name in choice.keys() & fixed):
            yield suffix, choice


def _shardings(
    world_size: int, ranks_per_node: int, *, asked: bool
) -> Iterator[tuple[str, Changes]]:
    """Yield (suffix of the label, fields) of every sharding that makes sense on these ranks; on a
    single rank those that offload, and the others if they are `asked` for."""
    for variant in VARIANTS.values():
        fields: Changes = dict(variant.fields)
        alone = not STRATEGIES[fields["strategy"]].needs_group
        if not variant.planned or (alone and world_size > 1):
            continue
        if variant.replicates:
            if world_size <= ranks_per_node:
                continue  # nothing to replicate across
            fields["replicate"] = world_size // ranks_per_node
        cuts = world_size > 1 or asked  # a single rank has nothing to shard over
        if alone or cuts:
            yield "", fields
        if variant.sharded_accumulation and cuts:
            yield _EACH, {**fields, **variant.sharded_accumulation}
        for suffix, more in variant.offloads.items() if variant.plans_offload else ():
            yield suffix, {**fields, **more}


def _goes_with_tensor(changes: Changes) -> bool:
    """Return whether a sharding is tried beside tensor parallelism: all states on each rank or
    none, since anything between is seldom the best."""
    of_torch = (v for v in VARIANTS.values() if "zero" not in v.fields)
    return any(v.fields == changes and v.level in (0, 3) for v in of_torch)


def _cuts(config: RunConfig, world_size: int, ranks_per_node: int) -> list[tuple[str, int]]:
    """Return (dimension, ranks) of context and tensor parallelism to try within a node.

    Context parallelism for long sequences, tensor parallelism for wide models, both where there
    are fewer sequences than ranks. A dimension that the user has set is not varied.
    """
    chosen, model = config.sharding, config.model.build()
    seq_len = config.data.seq_len or default_seq_len(model)
    few = (config.data.global_batch or world_size) < world_size
    sizes = [2**n for n in range(1, min(world_size, ranks_per_node).bit_length())]
    sizes = [size for size in sizes if world_size % size == 0]
    cuts = [("", 1)]
    if chosen.context_parallel == 1 and (few or seq_len >= LONG_SEQUENCE):
        cuts += [(_CONTEXT, size) for size in sizes]
    if chosen.tensor_parallel == 1 and (few or model.d_model >= WIDE_MODEL):
        divided = (model.heads, model.kv_head_count, model.ffn_dim)
        cuts += [(_TENSOR, size) for size in sizes if not any(n % size for n in divided)]
    return cuts


def _runs(
    config: RunConfig, fixed: Collection[str], world_size: int, device_type: str
) -> tuple[Resolved, ...]:
    """Resolve a candidate at every micro-batch that divides the global batch."""
    total = config.data.global_batch
    if "micro_batch" in fixed:
        sizes = [config.data.micro_batch]
    elif total is None:
        sizes = [2**n for n in range(LARGEST_MICRO_BATCH.bit_length())]  # 1, 2, ..., 128
    else:
        data_ranks = config.sharding.data_ranks(world_size)
        per_rank, rest = divmod(total, data_ranks)
        if rest:
            raise UserError(
                f"--global-batch {total} cannot be spread evenly over {data_ranks} ranks: give a "
                f"multiple of {data_ranks}"
            )
        sizes = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    found: list[Resolved] = []
    for size in sizes:
        try:
            found.append(run_of(config, size, world_size, device_type))
        except UserError:
            # The largest divides best, and accumulates nothing: if it is refused, too, all are.
            if not found:
                run_of(config, sizes[-1], world_size, device_type)
            elif parse(config.model.activation_checkpointing).budget_bytes is not None:
                break  # too small for larger ones
    return tuple(found)


def run_of(
    config: RunConfig,
    micro_batch: int,
    world_size: int,
    device_type: str,
    *,
    elsewhere: bool = True,
) -> Resolved:
    """Resolve a config at this micro-batch, with each block's share of a budget of activations.

    Args:
        elsewhere: it is to run on another machine; see `resolve`.

    Raises:
        UserError: the config is invalid, or the budget is too small.
    """
    run = resolve(
        config.replace(micro_batch=micro_batch),
        world_size=world_size,
        device_type=device_type,
        elsewhere=elsewhere,
    )
    return within_budget(run)
