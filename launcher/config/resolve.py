"""From what the user asked for to what will run: defaults filled in, contradictions refused.

Everything here happens before a process group, a download or an allocation.
"""

import dataclasses
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launcher.config import rules as support
from launcher.config.attention import choose_attention
from launcher.config.schema import DEFAULT_STEPS, RunConfig
from launcher.errors import NotInstalled, UserError
from launcher.model.attention import Choice
from launcher.model.config import ModelConfig
from launcher.run.offload_check import activation_refusal, nvme_refusal
from launcher.strategies import compiled

ALSO_CALLED = {
    "single": "one device",
    "ddp": "ZeRO-0",
    "fsdp": "ZeRO-3",
    "fsdp-grad-op": "ZeRO-2",
    "fsdp-hybrid": "ZeRO-3 in groups, replicated",
    "zero0": "DDP",
    "zero1": "optimizer sharding",
    "zero2": "FSDP shard grad op",
    "zero3": "FSDP full shard",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A config in which every choice is made, and what follows from it."""

    config: RunConfig
    model: ModelConfig
    """With the attention that runs; the config keeps what was asked for."""
    accumulation: int
    attention: Choice

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        assert self.config.data.seq_len is not None
        return self.config.data.seq_len

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        assert self.config.data.global_batch is not None
        return self.config.data.global_batch

    @property
    def steps(self) -> int:
        """Length of the schedule; known once the corpus is."""
        assert self.config.loop.steps is not None
        return self.config.loop.steps

    @property
    def strategy_label(self) -> str:
        """Short name of the sharding choice, for tables and folders: `zero2`, `fsdp-grad-op`."""
        sharding = self.config.sharding
        if sharding.strategy == "zero":
            label = f"zero{sharding.zero}"
        elif sharding.strategy == "fsdp" and sharding.replicate > 1:
            label = "fsdp-hybrid"
        elif sharding.strategy == "fsdp" and not sharding.reshard_after_forward:
            label = "fsdp-grad-op"
        else:
            label = str(sharding.strategy)
        return label

    @property
    def also_called(self) -> str:
        """The same choice in the other vocabulary (ZeRO stages / FSDP words)."""
        return ALSO_CALLED[self.strategy_label]


def resolve(config: RunConfig, *, world_size: int, device_type: str) -> Resolved:
    """Fill in what depends on the model, the ranks and the device, and check it all.

    The number of steps stays open when it is given in epochs: it needs the corpus.

    Raises:
        UserError: choices that cannot run together; NotInstalled: they could, were a package
            installed.
    """
    config = _choose_strategy(config, world_size)
    model = config.model.build()
    seq_len = config.data.seq_len or model.context
    if seq_len > model.context:
        raise UserError(
            f"--seq-len {seq_len} is longer than the model's context of {model.context}: "
            f"give --seq-len {model.context} or less, or --context {seq_len}"
        )
    config, accumulation = _batch(config.replace(seq_len=seq_len), world_size)
    steps = config.loop.steps
    if steps is None and config.loop.epochs is None:
        steps = DEFAULT_STEPS
    config = config.replace(steps=steps, device=device_type)
    support.check(
        support.Setting(config=config, accumulation=accumulation, device_type=device_type)
    )
    if config.measure.memory_snapshot and device_type == "cpu":
        raise UserError("--memory-snapshot records a GPU's allocator: on a CPU use --memory-trace")
    refused = compiled.refusal(config) or activation_refusal(config)
    if refused is not None:
        raise UserError(refused)
    attention = choose_attention(config, model, device_type=device_type)
    model = dataclasses.replace(model, attention=attention.kind)
    missing = support.missing_package(config)
    if missing is not None:
        raise NotInstalled(missing)
    return Resolved(config=config, model=model, accumulation=accumulation, attention=attention)


def steps_of_epochs(epochs: float, sequences: int, global_batch: int) -> int:
    """Optimizer steps that `epochs` passes over `sequences` take, at least one."""
    return max(1, math.ceil(epochs * sequences / global_batch))


def check_run_folder(out: Path) -> None:
    """Refuse a run folder that exists or cannot be made; leaves nothing behind.

    Raises:
        UserError: `out` exists, or nothing can be made in its nearest existing parent.
    """
    if out.exists() or out.is_symlink():
        raise UserError(
            f"--out {out}: already exists, and nothing is overwritten: choose another folder"
        )
    try:
        check_writable(out)
    except UserError as error:
        raise UserError(f"--out {error}") from None


def check_writable(path: Path) -> None:
    """Leaves nothing behind.

    Raises:
        UserError: nothing can be made in the nearest folder of `path` that exists.
    """
    parent = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"{path}: {parent} is a file, not a folder; choose another place")
    try:
        # Only trying tells: root passes every permission check, even on a read-only file system.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".shardscale-") as folder:
            Path(folder, "room").write_bytes(bytes(4096))  # a full disk still makes folders
    except OSError as error:
        raise UserError(
            f"{path}: {parent} cannot be written to ({error.strerror}); choose another place"
        ) from None


def _choose_strategy(config: RunConfig, world_size: int) -> RunConfig:
    sharding = config.sharding
    strategy = sharding.strategy
    if sharding.zero is not None:
        if strategy not in (None, "zero"):
            raise UserError(
                f"--zero {sharding.zero} and --strategy {strategy} contradict each other: give one"
            )
        strategy = "zero"
    elif strategy == "zero":
        raise UserError("--strategy zero needs a stage: give --zero 0, 1, 2 or 3")
    elif strategy is None:
        strategy = "ddp" if world_size > 1 else "single"
    if strategy == "single" and world_size > 1:
        raise UserError(
            f"--strategy single runs in one process, but there are {world_size}: "
            "use ddp, fsdp or zero, or start one process"
        )
    config = config.replace(strategy=strategy)
    _check_sharding(config, world_size)
    if strategy == "fsdp" and "cpu" in (sharding.offload_optimizer, sharding.offload_param):
        # FSDP2 keeps optimizer states where the sharded parameters are: they move together.
        config = config.replace(offload_optimizer="cpu", offload_param="cpu")
    return config


def _check_sharding(config: RunConfig, world_size: int) -> None:
    sharding, strategy = config.sharding, config.sharding.strategy
    for name, zero in (("offload_optimizer", "--zero"), ("offload_param", "--zero 3")):
        value = getattr(sharding, name)
        flag = f"--{name.replace('_', '-')} {value}"
        if value == "cpu" and strategy not in ("fsdp", "zero"):
            raise UserError(f"{flag} needs --strategy fsdp or {zero}, not {strategy}")
    refused = nvme_refusal(config)
    if refused is not None:
        raise UserError(refused)
    if strategy == "zero" and sharding.offload_optimizer != "none" and sharding.zero == 0:
        raise UserError(
            "--offload-optimizer cpu needs a sharded optimizer: give --zero 1, 2 or 3, not 0"
        )
    if strategy == "zero" and sharding.offload_param != "none" and sharding.zero != 3:
        raise UserError(
            f"--offload-param {sharding.offload_param} needs sharded parameters: "
            f"give --zero 3, not --zero {sharding.zero}"
        )
    if strategy != "fsdp":
        for name, value, default in (
            (f"--replicate {sharding.replicate}", sharding.replicate, 1),
            ("--no-reshard-after-forward", sharding.reshard_after_forward, True),
            ("--reduce-each-micro-batch", sharding.reduce_each_micro_batch, False),
        ):
            if value != default:
                raise UserError(
                    f"{name} belongs to --strategy fsdp, not {strategy}: leave it out or use fsdp"
                )
    if world_size % sharding.replicate:
        fitting = [n for n in range(1, min(world_size, 256) + 1) if world_size % n == 0]
        raise UserError(
            f"--replicate {sharding.replicate} does not divide {world_size} ranks: use one of "
            + ", ".join(map(str, fitting))
        )
    if sharding.grad_accum_dtype == "bf16" and (
        strategy != "zero" or config.optim.precision != "bf16" or sharding.zero == 0
    ):
        raise UserError("--grad-accum-dtype bf16 needs --zero 1, 2 or 3 with --precision bf16")


def _batch(config: RunConfig, world_size: int) -> tuple[RunConfig, int]:
    per_step = config.data.micro_batch * world_size
    total = config.data.global_batch or per_step
    accumulation, rest = divmod(total, per_step)
    if rest:
        lower, upper = accumulation * per_step, (accumulation + 1) * per_step
        nearest = upper if lower == 0 or upper - total < total - lower else lower
        raise UserError(
            f"--global-batch {total} is not a multiple of micro-batch {config.data.micro_batch} x "
            f"{world_size} ranks = {per_step}: the nearest that is, is {nearest}"
        )
    return config.replace(global_batch=total), accumulation
