"""Refusals about the strategy, offload and batch sizes."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.model.foreign.config import ForeignConfig
from launcher.util.flags import as_flags
from launcher.util.sizes import counted

_OFFLOADS: Final = (
    ("offload_optimizer", "cpu", ("--strategy fsdp", "--zero 1", "--zero 2", "--zero 3")),
    ("offload_param", "cpu", ("--strategy fsdp", "--zero 3")),
    # At lower stages DeepSpeed keeps in host memory what it should write to a disk.
    ("offload_optimizer", "nvme", ("--zero 3",)),
    ("offload_param", "nvme", ("--zero 3",)),
)
"""Field, value, and where states or parameters are sharded in a way that can be offloaded."""


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
            "add --strategy ddp, --strategy fsdp or --zero N, or start one process"
        )


def offload(setting: Setting) -> Iterator[str]:
    """Reject offload that the strategy or stage does not support."""
    chosen, stage = setting.config.sharding, setting.stage
    here = f"--strategy {chosen.strategy}" if stage is None else f"--zero {stage}"
    for name, value, places in _OFFLOADS:
        if getattr(chosen, name) == value and here not in places:
            *others, last = places
            needed = f"{', '.join(others)} or {last}" if others else last
            given = as_flags({name: value})
            yield f"{given} needs {needed}, not {here}: change that, or leave it out"
    # All other optimizer states are in one place: FSDP's where the parameters are, those of lower
    # stages in a flat buffer of all matrices.
    if chosen.offload_fraction < 1 and (here, chosen.offload_optimizer) != ("--zero 3", "cpu"):
        yield (
            f"--offload-fraction {chosen.offload_fraction:g} needs --zero 3 --offload-optimizer "
            f"cpu, not {here} --offload-optimizer {chosen.offload_optimizer}: give both, or leave "
            "it out"
        )


def nvme(setting: Setting) -> Iterator[str]:
    """Reject NVMe offload that lacks what DeepSpeed needs."""
    config, flags = setting.config, setting.config.sharding.flags_to("nvme")
    if flags and config.sharding.nvme_path is None:
        yield f"{flags} needs --nvme-path: give a folder on a local disk"
    if config.sharding.offload_param == "nvme" and config.optim.precision != "bf16":
        yield (
            f"--offload-param nvme needs --precision bf16, not {config.optim.precision}: "
            "DeepSpeed reads parameters back as bf16 only"
        )


def replicate(setting: Setting) -> Iterator[str]:
    """Reject replicas that do not divide the ranks."""
    chosen, size = setting.config.sharding, setting.world_size
    replicas, tensor, ranks = chosen.replicate, chosen.tensor_parallel, chosen.shard_ranks(size)
    if chosen.strategy == "fsdp" and ranks % replicas:
        fitting = [n for n in range(1, min(ranks, 256) + 1) if ranks % n == 0]
        of_tensor = f" ({size} with --tensor-parallel {tensor})" if tensor > 1 else ""
        yield (
            f"--replicate {replicas} does not divide {counted(ranks, 'rank')}{of_tensor}: use one "
            "of " + ", ".join(map(str, fitting))
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
        given, ranks = setting.config.data.micro_batch, setting.data_ranks
        product = f"micro-batch {given} x {counted(ranks, 'rank')} = {per_step}"
        # first what leaves the training as it is, as where a run goes on with more ranks
        smaller = next((n for n in range(given, 0, -1) if total % (n * ranks) == 0), None)
        yield (
            f"--global-batch {total} is not a multiple of {product}: use "
            f"{f'--micro-batch {smaller}, or ' if smaller else ''}--global-batch {nearest}"
        )


RULES: Final[tuple[Rule, ...]] = (
    strategy,
    offload,
    nvme,
    replicate,
    grad_accum_dtype,
    seq_len,
    batch,
)
