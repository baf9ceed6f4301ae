"""Refusals about the strategy, offload and batch sizes, and of flags without effect."""

from collections.abc import Iterator, Mapping
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.config.schema import RunConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.util.flags import as_flags

_DEFAULT: Final = RunConfig()
_BELONGS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("replicate", "reshard_after_forward", "reduce_each_micro_batch"), ("strategy", "fsdp")
    ),
    "momentum": ("optimizer", "sgd"),
    "apollo_rank": ("optimizer", "apollo"),
    "moments_dtype": ("optimizer", "adamw"),
    "compensation": ("precision", "bf16-pure"),
    "decay_steps": ("schedule", "wsd"),
}
"""Field -> the field and its only value with which it has an effect."""


def strategy(setting: Setting) -> Iterator[str]:
    """Reject contradictions of --strategy, --zero and the number of ranks."""
    chosen = setting.config.sharding
    if chosen.zero is not None and chosen.strategy != "zero":
        yield (
            f"--zero {chosen.zero} and --strategy {chosen.strategy} contradict each other: give one"
        )
    if chosen.strategy == "zero" and chosen.zero is None:
        yield "--strategy zero needs a stage: give --zero 0, 1, 2 or 3"
    if chosen.strategy == "single" and setting.world_size > chosen.tensor_parallel:
        yield (
            f"--strategy single runs in one process, but there are {setting.world_size}: "
            "use ddp, fsdp or zero, or start one process"
        )


def offload(setting: Setting) -> Iterator[str]:
    """Reject offload that the strategy or stage does not support."""
    chosen = setting.config.sharding
    for name, zero in (("offload_optimizer", "--zero"), ("offload_param", "--zero 3")):
        value = getattr(chosen, name)
        if value == "cpu" and chosen.strategy not in ("fsdp", "zero"):
            flag = f"--{name.replace('_', '-')} {value}"
            yield f"{flag} needs --strategy fsdp or {zero}, not {chosen.strategy}"
    yield from _nvme(setting)
    if setting.stage == 0 and chosen.offload_optimizer != "none":
        yield "--offload-optimizer cpu needs a sharded optimizer: give --zero 1, 2 or 3, not 0"
    if setting.stage not in (None, 3) and chosen.offload_param != "none":
        yield (
            f"--offload-param {chosen.offload_param} needs sharded parameters: "
            f"give --zero 3, not --zero {setting.stage}"
        )


def offload_fraction(setting: Setting) -> Iterator[str]:
    """Reject --offload-fraction outside ZeRO-3, whose sub-groups it counts."""
    chosen = setting.config.sharding
    flag = f"--offload-fraction {chosen.offload_fraction:g}"
    if chosen.offload_fraction == 1:
        return
    if chosen.strategy == "fsdp":
        yield (
            f"{flag} needs --zero 3, not --strategy fsdp, which keeps optimizer states where the "
            "parameters are and moves all of them or none: use --zero 3, or leave it out"
        )
    elif setting.stage in (1, 2):
        yield (
            f"{flag} needs --zero 3, not {setting.stage}, whose optimizer holds one flat buffer of "
            "all matrices, which is in one place: use --zero 3, or leave it out"
        )
    elif chosen.offload_optimizer != "cpu":
        yield (
            f"{flag} is of what --offload-optimizer cpu moves, and it is "
            f"{chosen.offload_optimizer}: give --offload-optimizer cpu, or leave it out"
        )


def _nvme(setting: Setting) -> Iterator[str]:
    """Reject NVMe offload that DeepSpeed does not support, or silently does otherwise."""
    config, flags = setting.config, setting.config.sharding.flags_to("nvme")
    if not flags:
        return
    if setting.stage is None:
        yield (
            f"{flags} needs --zero 3, not --strategy {config.sharding.strategy}: give it, or use "
            "--strategy fsdp with cpu"
        )
    elif setting.stage != 3:
        yield (
            f"{flags} needs --zero 3, not {setting.stage}: at lower stages DeepSpeed keeps in host "
            "memory what it should write to a disk; give --zero 3, or use cpu"
        )
    if config.sharding.nvme_path is None:
        yield f"{flags} needs --nvme-path: give a folder on a local disk"
    if config.sharding.offload_param == "nvme" and config.optim.precision != "bf16":
        yield (
            f"--offload-param nvme needs --precision bf16, not {config.optim.precision}: "
            "DeepSpeed reads parameters back as bf16 only"
        )


def without_effect(setting: Setting) -> Iterator[str]:
    """Reject flags of a choice that was not made."""
    config = setting.config
    for name, (choice, needed) in _BELONGS.items():
        value, chosen = config.get(name), config.get(choice)
        if chosen != needed and value != _DEFAULT.get(name):
            owner = as_flags({choice: needed})
            yield (
                f"{as_flags({name: value})} belongs to {owner}, not {chosen}: leave it out, or "
                f"give {owner}"
            )


def replicate(setting: Setting) -> Iterator[str]:
    """Reject replicas that do not divide the ranks."""
    chosen, size = setting.config.sharding, setting.world_size
    replicas, tensor, ranks = chosen.replicate, chosen.tensor_parallel, chosen.shard_ranks(size)
    if ranks % replicas:
        fitting = [n for n in range(1, min(ranks, 256) + 1) if ranks % n == 0]
        of_tensor = f" ({size} with --tensor-parallel {tensor})" if tensor > 1 else ""
        yield (
            f"--replicate {replicas} does not divide {ranks} ranks{of_tensor}: use one of "
            + ", ".join(map(str, fitting))
        )


def grad_accum_dtype(setting: Setting) -> Iterator[str]:
    """Reject bf16 gradient accumulation outside DeepSpeed's bf16."""
    config = setting.config
    if config.sharding.grad_accum_dtype == "bf16" and (
        not setting.stage or config.optim.precision != "bf16"
    ):
        yield "--grad-accum-dtype bf16 needs --zero 1, 2 or 3 with --precision bf16"


def seq_len(setting: Setting) -> Iterator[str]:
    """Reject sequences longer than the model's context."""
    tokens, context = setting.seq_len, setting.model.context
    if tokens > context:
        stored = setting.config.model.init_from is not None and setting.model.position == "learned"
        fixed = stored or isinstance(setting.model, ForeignConfig)
        yield (
            f"--seq-len {tokens} is longer than the model's context of {context}: "
            f"give --seq-len {context} or less{'' if fixed else f', or --context {tokens}'}"
        )


def batch(setting: Setting) -> Iterator[str]:
    """Reject a global batch that is no multiple of all ranks' micro-batches."""
    total, per_step = setting.config.data.global_batch, setting.batch_per_micro_batch
    assert total is not None  # filled in
    if total % per_step:
        lower = setting.accumulation * per_step
        upper = lower + per_step
        nearest = upper if lower == 0 or upper - total < total - lower else lower
        yield (
            f"--global-batch {total} is not a multiple of micro-batch "
            f"{setting.config.data.micro_batch} x {setting.data_ranks} ranks = {per_step}: "
            f"use --global-batch {nearest}"
        )


RULES: Final[tuple[Rule, ...]] = (
    strategy,
    offload,
    offload_fraction,
    without_effect,
    replicate,
    grad_accum_dtype,
    seq_len,
    batch,
)
