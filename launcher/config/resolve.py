"""From what the user asked for to what will run: defaults filled in, contradictions refused.

Everything here happens before a process group, a download or an allocation.
"""

import dataclasses
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launcher.config import rules
from launcher.config.attention import choose_attention
from launcher.config.schema import DEFAULT_STEPS, RunConfig
from launcher.errors import NotInstalled, UserError
from launcher.model.attention import Choice
from launcher.model.config import ModelConfig


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


def resolve(config: RunConfig, *, world_size: int, device_type: str) -> Resolved:
    """Fill in what depends on the model, the ranks and the device, and check it all.

    The number of steps stays open when it is given in epochs: it needs the corpus.

    Raises:
        UserError: choices that cannot run together; NotInstalled: they could, were a package
            installed.
    """
    model = config.model.build()
    config = _filled(config, model, world_size=world_size, device_type=device_type)
    setting = rules.Setting(
        config=config,
        model=model,
        world_size=world_size,
        device_type=device_type,
    )
    refused = rules.refusal(setting)
    if refused is not None:
        raise UserError(refused)
    attention = choose_attention(config, model, device_type=device_type)
    model = dataclasses.replace(model, attention=attention.kind)
    missing = rules.missing_package(config)
    if missing is not None:
        raise NotInstalled(missing)
    return Resolved(
        config=config, model=model, accumulation=setting.accumulation, attention=attention
    )


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


def _filled(
    config: RunConfig, model: ModelConfig, *, world_size: int, device_type: str
) -> RunConfig:
    """Every default that depends on something else."""
    sharding = config.sharding
    strategy = sharding.strategy
    if strategy is None and sharding.zero is not None:
        strategy = "zero"
    elif strategy is None:
        strategy = "ddp" if world_size > 1 else "single"
    steps = config.loop.steps
    if steps is None and config.loop.epochs is None:
        steps = DEFAULT_STEPS
    if strategy == "fsdp" and "cpu" in (sharding.offload_optimizer, sharding.offload_param):
        # FSDP2 keeps optimizer states where the sharded parameters are: they move together.
        config = config.replace(offload_optimizer="cpu", offload_param="cpu")
    return config.replace(
        strategy=strategy,
        seq_len=config.data.seq_len or model.context,
        global_batch=config.data.global_batch or config.data.micro_batch * world_size,
        steps=steps,
        device=device_type,
    )
