"""Resolve a RunConfig: fill in defaults and reject contradictions.

Everything here happens before a process group, a download or an allocation.
"""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from launcher.config.compile_choice import KEPT_SHARE, with_compile
from launcher.config.graphs_choice import with_cuda_graphs
from launcher.config.model import part_of
from launcher.config.recipes import fill, recipe_of, task_of
from launcher.config.rules import (
    Setting,
    compute,
    model,
    parallel,
    sharding,
    transformers,
)
from launcher.config.rules.parallel import context_parallel_method
from launcher.config.schema import RunConfig
from launcher.config.transformers_config import names_config
from launcher.model import attention as kernels
from launcher.model.attention import AttentionChoice, AttentionSetting
from launcher.model.checkpointing import parse
from launcher.model.config import AttentionKind, ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.optim.dtypes import dtypes
from launcher.util.errors import NotInstalled, UserError, naming
from launcher.util.files import check_writable, is_empty
from launcher.util.packages import how_to_install
from launcher.util.startup import expands_segments

DEFAULT_STEPS = 300
BF16_CAPABILITY: Final = 8, 0
"""Compute capability from which tensor cores multiply in bf16 (NVIDIA A100's whitepaper, 2020)."""
RULES: Final = (*model.RULES, *parallel.RULES, *sharding.RULES, *compute.RULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Setting):
    """A setting in which every choice is made, and what follows from it. Its model has the
    attention that runs; the config keeps what was asked for."""

    attention: AttentionChoice
    expandable_segments: bool
    """The GPU's allocator grows segments page by page, so that freed memory is not left in
    fragments: always, unless $PYTORCH_ALLOC_CONF or $PYTORCH_CUDA_ALLOC_CONF is set."""
    precision_reason: str = ""
    """Why `--precision auto` is what it is on a GPU; empty where nothing was to choose."""
    compile_reason: str = ""
    """The same of `--compile auto`."""
    of_another_trainer: bool = False
    """Blocks run torch's operators and no kernels of this launcher's; compiled ones without
    activation checkpointing keep what torch chooses, and no less."""
    graphs_reason: str = ""
    """Why `--cuda-graphs auto` is on; empty where it is off, or given."""

    def decoder_lines(self) -> list[str]:
        """Describe, for the console, whose code computes a config of transformers."""
        if isinstance(self.model, ForeignConfig):
            return self.model.lines()
        return ["decoder: shardscale's own"] if names_config(self.config.model.model) else []

    def compile_lines(self) -> list[str]:
        """Describe, for the console, what `--compile auto` and `--cuda-graphs auto` are."""
        chosen = "on" if self.config.loop.compiles else "off"
        lines = [f"compile: {chosen} ({self.compile_reason})"] if self.compile_reason else []
        return [
            *lines,
            *([f"CUDA graphs: on ({self.graphs_reason})"] if self.graphs_reason else []),
        ]

    def budget_lines(self) -> list[str]:
        """Describe, for the console, what a budget of recomputation selects."""
        asked = self.config.model.activation_checkpointing
        if parse(asked).budget_bytes is None:
            return []
        return [f"activation checkpointing: {asked} is {self.model.activation_checkpointing}"]

    @property
    def kept_share(self) -> float:
        """Most that a compiled block keeps, of what it would (`strategies/compiled.py`)."""
        whole = self.config.model.activation_checkpointing == "none"
        fp8 = self.config.optim.arithmetic.fp8_linears
        return KEPT_SHARE if whole and not fp8 and not self.of_another_trainer else 1.0

    @property
    def own_model(self) -> ModelConfig:
        """The part of the model that one rank computes."""
        ranks = self.config.sharding.tensor_parallel
        return self.model if ranks == 1 else part_of(self.model, ranks)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        assert self.config.data.global_batch is not None
        return self.config.data.global_batch

    @property
    def steps(self) -> int:
        """Length of the schedule; known after the corpus is read."""
        assert self.config.loop.steps is not None
        return self.config.loop.steps


def resolve(
    config: RunConfig,
    *,
    world_size: int,
    device_type: str,
    elsewhere: bool = False,
    compiled_before: bool | None = None,
) -> Resolved:
    """Fill in what depends on the model, the ranks and the device, and check everything.

    The number of steps stays open when it is given in epochs: it needs the corpus.

    Args:
        elsewhere: skip the check of what is installed on this machine.
        compiled_before: what `--compile` was in the run that is resumed, if any.

    Raises:
        UserError: choices that cannot run together; NotInstalled: they could, were a package
            installed.
    """
    model = config.model.build()
    setting = Setting(config=config, model=model, world_size=world_size, device_type=device_type)
    setting = _filled(setting)
    setting, precision_reason = _with_precision(setting)
    setting, compile_reason = with_compile(setting, compiled_before)
    setting, graphs_reason = with_cuda_graphs(setting)
    config = setting.config
    refused = refusal(setting)
    if refused is not None:
        raise UserError(refused)
    attention = _attention(setting, elsewhere=elsewhere)
    if config.optim.arithmetic.fp8_linears and not elsewhere and find_spec("torchao") is None:
        raise NotInstalled(
            f"--precision {config.optim.precision} needs torchao: {how_to_install('gpu')}"
        )
    return Resolved(
        config=config,
        model=dataclasses.replace(model, attention=attention.kind),
        world_size=world_size,
        device_type=device_type,
        attention=attention,
        expandable_segments=device_type == "cuda" and expands_segments(),
        precision_reason=precision_reason,
        compile_reason=compile_reason,
        graphs_reason=graphs_reason,
    )


def refusal(setting: Setting) -> str | None:
    """Return the reason why a setting cannot run, or None."""
    return next(_refusals(setting), None)


def _refusals(setting: Setting) -> Iterator[str]:
    if isinstance(setting.model, ForeignConfig):
        for rule in transformers.RULES:
            yield from rule(setting, setting.model)
    for own_rule in RULES:
        yield from own_rule(setting)


def check_run_folder(out: Path, *, may_be_empty: bool = False) -> None:
    """Refuse a run folder that exists or cannot be made; leaves nothing behind.

    Raises:
        UserError: `out` exists (`may_be_empty`: and is no empty folder), or nothing can be made in
            its nearest existing parent.
    """
    if os.path.lexists(out) and not (may_be_empty and is_empty(out)):
        raise UserError(
            f"--out {out}: already exists, and nothing is overwritten: choose another folder"
        )
    with naming("--out"):
        check_writable(out)


def _filled(setting: Setting) -> Setting:
    """Fill in the defaults that depend on something else."""
    config, sharding = setting.config, setting.config.sharding
    strategy = sharding.strategy
    if strategy is None and sharding.zero is not None:
        strategy = "zero"
    elif strategy is None:
        one_replica = setting.world_size <= sharding.tensor_parallel
        strategy = "single" if one_replica else "ddp"
    steps = config.loop.steps
    if steps is None and config.loop.epochs is None:
        steps = DEFAULT_STEPS
    if strategy == "fsdp" and "cpu" in (sharding.offload_optimizer, sharding.offload_param):
        # FSDP2 keeps optimizer states where the sharded parameters are: they move together.
        config = config.replace(offload_optimizer="cpu", offload_param="cpu")
    config = fill(config, recipe_of(task_of(config), config.optim))
    micro_batch = config.data.micro_batch_for(setting.data_ranks)
    config = config.replace(
        micro_batch=micro_batch,
        strategy=strategy,
        seq_len=setting.seq_len,
        global_batch=config.data.global_batch or micro_batch * setting.data_ranks,
        context_parallel_method=context_parallel_method(sharding, setting.model),
        steps=steps,
        device=setting.device_type,
    )
    return dataclasses.replace(setting, config=config)


def _with_precision(setting: Setting) -> tuple[Setting, str]:
    """Choose what `--precision auto` is: bf16 on a GPU that computes in it, unless something that
    is asked for goes with fp32 only; return the reason, too.

    Where no GPU is visible (a login node), it is taken for one that does.
    """
    if setting.config.optim.precision != "auto":
        return setting, ""
    fp32, bf16 = (setting.changed(precision=name) for name in ("fp32", "bf16"))
    if setting.device_type != "cuda":
        return fp32, ""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < BF16_CAPABILITY:
        gpu = torch.cuda.get_device_name()
        return fp32, f"auto: {gpu} does not compute in bf16"
    refused = refusal(bf16)
    if refused is not None and refusal(fp32) is None:
        return fp32, f"auto: not bf16, since {refused}"
    return bf16, "auto: the GPU computes in it; weights and optimizer states stay in fp32"


def _attention(setting: Setting, *, elsewhere: bool) -> AttentionChoice:
    """Choose the kernel that `--attention` selects; allocates nothing on a GPU.

    Where no GPU is visible (a login node), its compute capability is not held against a kernel.

    Raises:
        UserError: one that is asked for cannot run, with the reason; NotInstalled where only its
            package is missing.
    """
    model = setting.model
    choice = _able(setting, model.attention, elsewhere)
    if isinstance(model, ForeignConfig):
        return dataclasses.replace(choice, reason=model.attention_reason)
    recomputes = model.checkpointing.keeps_products and not setting.config.loop.compiles
    if kernels.KERNELS[choice.kind].compiles_alone and recomputes:
        if model.attention == choice.kind:
            raise UserError(
                f"--attention {choice.kind} with --activation-checkpointing "
                f"{model.activation_checkpointing} needs --compile: give it, or full "
                "checkpointing, or --attention sdpa"
            )
        choice = _able(setting, "sdpa", elsewhere)
    return choice


def _able(setting: Setting, kind: AttentionKind, elsewhere: bool) -> AttentionChoice:
    config, model = setting.config, setting.model
    visible = setting.device_type == "cuda" and not elsewhere and torch.cuda.is_available()
    asked = AttentionSetting(
        device_type=setting.device_type,
        dtype=dtypes(config.optim).computed,
        head_size=model.head_size,
        window=model.window,
        dropout=model.dropout,
        documents=config.data.document_attention,
        capability=torch.cuda.get_device_capability() if visible else None,
    )
    return kernels.choose(kind, asked, sdpa_backend=model.sdpa_backend, elsewhere=elsewhere)
