"""Which matrices can be cut over ranks, and what works on whole ones only."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.config.schema import AutoMicroBatch
from launcher.optim.registry import OPTIMIZERS


def ranks(setting: Setting) -> Iterator[str]:
    """Ranks that are no multiple of those that share matrices and sequences."""
    chosen, size = setting.config.sharding, setting.world_size
    tensor, sequence = chosen.tensor_parallel, chosen.context_parallel
    if tensor == 1:
        return
    flags, needed = f"--tensor-parallel {tensor}", tensor * sequence
    if sequence > 1:
        flags += f" with --context-parallel {sequence}"
    if size < needed:
        yield (
            f"{flags} needs {needed} ranks or a multiple, and this is {size}: start more with "
            "torchrun --nproc, or leave it out"
        )
    elif size % needed:
        fitting = [n for n in range(1, size + 1) if size % (n * sequence) == 0]
        yield (
            f"{flags} does not divide {size} ranks: use --tensor-parallel "
            + (" or ".join(map(str, fitting[:20])) or "1 and another --context-parallel")
        )


def shapes(setting: Setting) -> Iterator[str]:
    """Heads and widths that cannot be cut evenly."""
    model, number = setting.model, setting.config.sharding.tensor_parallel
    flag = f"--tensor-parallel {number}"
    if model.heads % number or model.kv_head_count % number:
        most = [
            n
            for n in range(1, number + 1)
            if model.heads % n == model.kv_head_count % n == 0 and setting.world_size % n == 0
        ]
        keys = "" if model.kv_heads is None else f" with {model.kv_head_count} of keys"
        yield (
            f"{flag} gives each rank as many heads, and {model.heads} heads{keys} do not divide: "
            f"use --tensor-parallel {most[-1]}"
        )
    elif model.ffn_dim % number:
        upper = -(-model.ffn_dim // number) * number
        yield (
            f"{flag} does not divide the MLP's width of {model.ffn_dim}: use --d-ff {upper}, or "
            "another number of ranks"
        )
    elif model.vocab_size < number:
        yield f"{flag} is more ranks than the {model.vocab_size} tokens of the vocabulary"


def rows(setting: Setting) -> Iterator[str]:
    """Between the matrices each rank has as many of a micro-batch's tokens."""
    config, number = setting.config, setting.config.sharding.tensor_parallel
    if isinstance(config.data.micro_batch, AutoMicroBatch):
        if number > 1:
            yield (
                "--micro-batch auto measures whole matrices, not those of --tensor-parallel "
                f"{number}: give a number (shardscale plan says what fits)"
            )
        return
    tokens = config.data.micro_batch * setting.local_seq_len
    if tokens % number:
        yield (
            f"--tensor-parallel {number} gives each rank as many of a micro-batch's {tokens} "
            f"tokens (--micro-batch {config.data.micro_batch} x {setting.local_seq_len}), which do "
            f"not divide: use --micro-batch {-(-config.data.micro_batch // number) * number}"
        )


def whole_matrices(setting: Setting) -> Iterator[str]:
    """What needs all of a matrix, or one token after the other."""
    config, number = setting.config, setting.config.sharding.tensor_parallel
    if number == 1:
        return
    flag, name = f"--tensor-parallel {number}", config.optim.optimizer
    if not OPTIMIZERS[name].elementwise:
        yield (
            f"--optimizer {name} updates whole matrices, and {flag} cuts them: use --strategy "
            "fsdp without it, or --optimizer adamw8bit"
        )
    if config.optim.precision == "fp8":
        yield f"--precision fp8 scales whole matrices, and {flag} cuts them: use --precision bf16"
    if config.loop.sample_every is not None:
        yield (
            f"--sample-every {config.loop.sample_every} writes with whole matrices, and {flag} "
            "cuts them: leave it out, and use shardscale generate on a checkpoint"
        )
    if config.sharding.flags_to("nvme"):
        yield (
            f"{config.sharding.flags_to('nvme')} is not proven with {flag}: offload to cpu, or "
            "use --zero 3 without it"
        )


RULES: Final[tuple[Rule, ...]] = (ranks, shapes, rows, whole_matrices)
