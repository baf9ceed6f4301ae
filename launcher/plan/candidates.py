"""Every way to run a model on so many ranks that is worth predicting."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.config.deepspeed_file import adopted_fields
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.errors import UserError
from launcher.flags import fields_of
from launcher.strategies import STRATEGIES, VARIANTS, strategy_of
from launcher.strategies.base import unknown_versions

LARGEST_MICRO_BATCH: Final = 128  # tried where no global batch bounds it
PRECISIONS: Final = ("bf16", "fp32")
Changes = dict[str, Any]
CHECKPOINTING: Final = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way of sharding, precision and checkpointing, with every micro-batch it can take."""

    label: str
    precision: str
    checkpointing: str
    runs: tuple[Resolved, ...]
    """By growing micro-batch; at least one."""


def choices(
    config: RunConfig,
    fixed: Collection[str],
    *,
    world_size: int,
    ranks_per_node: int,
    device_type: str,
    precisions: Sequence[str] = PRECISIONS,
) -> list[Choice]:
    """All valid combinations that leave the fields in `fixed` as they are in `config`.

    Raises:
        UserError: there is none; the reason of the last one that was tried.
    """
    found: list[Choice] = []
    problem: UserError | None = None
    for label, changes in _combinations(config, fixed, world_size, ranks_per_node, precisions):
        try:
            runs = _runs(config.replace(**changes), fixed, world_size, device_type)
            if unknown := unknown_versions(strategy_of(runs[0].config)):
                raise UserError(unknown)
        except UserError as error:
            problem = error
            continue
        found.append(
            Choice(
                label=label,
                precision=changes["precision"],
                checkpointing=changes["activation_checkpointing"],
                runs=runs,
            )
        )
    if not found:
        assert problem is not None
        raise problem
    return found


def given_fields(argv: Collection[str], config: RunConfig) -> set[str]:
    """Fields that the user has set: named on the command line, or not at their default."""
    named = fields_of(argv)
    default = RunConfig().flat()
    flat = config.flat()
    changed = {name for name, value in flat.items() if default.get(name) != value}
    fields = {
        field.name
        for section in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, section.name))
    }
    given = (named & fields) | changed | adopted_fields(config.sharding.deepspeed)
    return given - {"micro_batch"} if isinstance(config.data.micro_batch, AutoMicroBatch) else given


def _combinations(
    config: RunConfig,
    fixed: Collection[str],
    world_size: int,
    ranks_per_node: int,
    precisions: Sequence[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    flat = config.flat()
    for label, changes in _shardings(world_size, ranks_per_node):
        if "zero" in fixed and changes.get("zero") != config.sharding.zero:
            continue
        for precision in (config.optim.precision,) if "precision" in fixed else precisions:
            for checkpointing in CHECKPOINTING:
                choice = changes | {
                    "precision": precision,
                    "activation_checkpointing": checkpointing,
                }
                # A fixed field that this label leaves alone keeps the user's value.
                if all(
                    flat.get(name, value) == value
                    for name, value in choice.items()
                    if name in fixed
                ):
                    yield label, choice


def _shardings(world_size: int, ranks_per_node: int) -> Iterator[tuple[str, Changes]]:
    """Every way of sharding that makes sense on so many ranks, without and with offload."""
    for variant in VARIANTS.values():
        fields: Changes = dict(variant.fields)
        alone = not STRATEGIES[fields["strategy"]].needs_group
        if not variant.planned or alone != (world_size == 1):
            continue
        if variant.replicates:
            if world_size <= ranks_per_node:
                continue  # nothing to replicate across
            fields["replicate"] = world_size // ranks_per_node
        yield variant.label, fields
        for suffix, more in variant.offloads.items() if variant.plans_offload else ():
            yield variant.label + suffix, {**fields, **more}


def _runs(
    config: RunConfig, fixed: Collection[str], world_size: int, device_type: str
) -> tuple[Resolved, ...]:
    """The same choice with every micro-batch that divides the global batch."""
    if "micro_batch" in fixed:
        return (resolve(config, world_size=world_size, device_type=device_type),)
    total = config.data.global_batch
    if total is None:
        sizes = [2**n for n in range(LARGEST_MICRO_BATCH.bit_length())]
    else:
        per_rank, rest = divmod(total, world_size)
        if rest:
            raise UserError(
                f"--global-batch {total} cannot be spread evenly over {world_size} ranks: give a "
                f"multiple of {world_size}"
            )
        sizes = [n for n in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1) if per_rank % n == 0]
    return tuple(
        resolve(config.replace(micro_batch=size), world_size=world_size, device_type=device_type)
        for size in sizes
    )
