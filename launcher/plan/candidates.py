"""Every way to run a model on so many ranks that is worth predicting."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.config.deepspeed_file import adopted_fields
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.errors import UserError
from launcher.flags import fields_of

LARGEST_MICRO_BATCH: Final = 128  # tried where no global batch bounds it
PRECISIONS: Final = ("bf16", "fp32")
CHECKPOINTING: Final = ("none", "selective", "full")

# Label -> what is set for it. ZeRO-0 is DDP, and is not tried twice.
SHARDING: Final[Mapping[str, Mapping[str, Any]]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-grad-op": {"strategy": "fsdp", "reshard_after_forward": False},
    "fsdp-hybrid": {"strategy": "fsdp"},
    "fsdp+cpu": {"strategy": "fsdp", "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero1": {"strategy": "zero", "zero": 1},
    "zero1+cpu": {"strategy": "zero", "zero": 1, "offload_optimizer": "cpu"},
    "zero2": {"strategy": "zero", "zero": 2},
    "zero2+cpu": {"strategy": "zero", "zero": 2, "offload_optimizer": "cpu"},
    "zero3": {"strategy": "zero", "zero": 3},
    "zero3+cpu": {"strategy": "zero", "zero": 3, "offload_optimizer": "cpu"},
    "zero3+cpu+param": {
        "strategy": "zero",
        "zero": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}


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
    for label, sharding in SHARDING.items():
        if (label == "single") != (world_size == 1):
            continue
        changes = dict(sharding)
        if label == "fsdp-hybrid":
            if world_size <= ranks_per_node:
                continue  # nothing to replicate across
            changes["replicate"] = world_size // ranks_per_node
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
