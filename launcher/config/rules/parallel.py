"""Refusals about context parallelism and tensor parallelism."""

import math
from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.config.schema import AutoMicroBatch
from launcher.config.sharding import ContextParallelMethod, ShardingChoice
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import OPTIMIZERS
from launcher.util.flags import flag

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Limit of torch's flash attention, whose operators do not pad heads."""
FP32_BYTES = 4


def ranks(setting: Setting) -> Iterator[str]:
    """Reject ranks that are no multiple of the model-parallel groups, and a method without them."""
    chosen, size = setting.config.sharding, setting.world_size
    degrees = {flag(name): n for name, n in chosen.model_parallel.items() if n > 1}
    if chosen.context_parallel == 1 and chosen.context_parallel_method != "auto":
        yield (
            f"--context-parallel-method {chosen.context_parallel_method} needs sharded "
            "sequences: give --context-parallel 2 or more, or leave it out"
        )
    if not degrees:
        return
    flags = " with ".join(f"{name} {n}" for name, n in reversed(degrees.items()))
    needed, innermost = math.prod(degrees.values()), [*degrees][-1]
    if size < needed:
        yield (
            f"{flags} needs {needed} ranks or a multiple, and this is {size}: start more with "
            "torchrun --nproc, or leave it out"
        )
    elif size % needed:
        others = needed // degrees[innermost]
        fitting = [str(n) for n in range(1, size + 1) if size % (n * others) == 0]
        instead = " or ".join(fitting[:20]) or "1 and another --context-parallel"
        yield f"{flags} does not divide {size} ranks: use {innermost} {instead}"


def on_one_rank(setting: Setting) -> Iterator[str]:
    """Reject what only a rank that computes whole sequences of the whole model can do."""
    config = setting.config
    for name, number in config.sharding.model_parallel.items():
        if number > 1 and config.loop.sample_every:
            yield (
                f"--sample-every {config.loop.sample_every} writes on one rank alone, and "
                f"{flag(name)} {number} computes each sequence on several: leave it out, and use "
                "shardscale generate on a checkpoint"
            )
        if number > 1 and isinstance(config.data.micro_batch, AutoMicroBatch):
            yield (
                f"--micro-batch auto measures one rank alone, and {flag(name)} {number} computes "
                "each sequence on several: give a number (shardscale plan says what fits)"
            )


def tensor_shapes(setting: Setting) -> Iterator[str]:
    """Reject heads and widths that cannot be divided evenly."""
    model, number = setting.model, setting.config.sharding.tensor_parallel
    if isinstance(model, ForeignConfig):  # whose plan of matrices is asked
        return
    flags = f"--tensor-parallel {number}"
    if model.heads % number or model.kv_head_count % number:
        most = [
            n
            for n in range(1, number + 1)
            if model.heads % n == model.kv_head_count % n == 0 and setting.world_size % n == 0
        ]
        keys = "" if model.kv_heads is None else f" with {model.kv_head_count} of keys"
        yield (
            f"{flags} gives each rank as many heads, and {model.heads} heads{keys} do not divide: "
            f"use --tensor-parallel {most[-1]}"
        )
    elif model.ffn_dim % number:
        upper = -(-model.ffn_dim // number) * number
        yield (
            f"{flags} does not divide the MLP's width of {model.ffn_dim}: use --d-ff {upper}, or "
            "another number of ranks"
        )
    elif model.vocab_size < number:
        yield f"{flags} is more ranks than the {model.vocab_size} tokens of the vocabulary"


def tensor_rows(setting: Setting) -> Iterator[str]:
    """Reject micro-batches whose tokens the ranks cannot divide between matrices."""
    config, number = setting.config, setting.config.sharding.tensor_parallel
    tokens = config.data.micro_batch * setting.local_seq_len
    if isinstance(setting.model, ForeignConfig):  # each rank has all of them
        return
    if tokens % number:
        yield (
            f"--tensor-parallel {number} gives each rank as many of a micro-batch's {tokens} "
            f"tokens (--micro-batch {config.data.micro_batch} x {setting.local_seq_len}), which do "
            f"not divide: use --micro-batch {-(-config.data.micro_batch // number) * number}"
        )


def whole_matrices(setting: Setting) -> Iterator[str]:
    """Reject what needs whole matrices."""
    config, number = setting.config, setting.config.sharding.tensor_parallel
    if number == 1:
        return
    flags, name = f"--tensor-parallel {number}", config.optim.optimizer
    if not OPTIMIZERS[name].elementwise:
        yield (
            f"--optimizer {name} updates whole matrices, and {flags} shards them: use --strategy "
            "fsdp without it, or --optimizer adamw8bit"
        )
    if config.optim.arithmetic.fp8_linears:
        yield (
            f"--precision {config.optim.precision} scales whole matrices, and {flags} shards them: "
            "use --precision bf16"
        )
    if config.sharding.flags_to("nvme"):
        yield (
            f"{config.sharding.flags_to('nvme')} is not proven with {flags}: offload to cpu, or "
            "use --zero 3 without it"
        )


def context_parallel_method(sharding: ShardingChoice, model: ModelConfig) -> ContextParallelMethod:
    """Resolve `auto`: Ulysses, which supports every kernel, if its ranks divide the heads."""
    if sharding.context_parallel_method != "auto" or sharding.context_parallel == 1:
        return sharding.context_parallel_method
    return "ulysses" if _heads_divide(model, sharding) else "ring"


def context_heads(setting: Setting) -> Iterator[str]:
    """Reject Ulysses with heads that the ranks do not divide."""
    chosen, model = setting.config.sharding, setting.model
    number = chosen.context_parallel
    if chosen.context_parallel_method == "ulysses" and not _heads_divide(model, chosen):
        tensor = chosen.tensor_parallel
        yield (
            f"--context-parallel-method ulysses gives each of {number} ranks as many heads, and "
            f"{model.heads // tensor} heads with {model.kv_head_count // tensor} of keys do not "
            "divide: use --context-parallel-method ring"
        )


def ring(setting: Setting) -> Iterator[str]:
    """Reject what the kernel of ring attention, which merges partial scores, does not support."""
    config, model = setting.config, setting.model
    if config.sharding.context_parallel_method != "ring":
        return
    why = f"ring attention ({model.heads} heads on {config.sharding.context_parallel} ranks)"
    fix = "use --context-parallel-method ulysses with a --context-parallel that divides the heads"
    if model.window is not None:
        yield f"--window {model.window} does not go with {why}: {fix}"
    if model.dropout:
        yield f"--dropout {model.dropout} does not go with {why}: give --dropout 0, or {fix}"
    if config.data.document_attention:
        yield f"--document-attention does not go with {why}: {fix}"
    if model.attention not in ("auto", "sdpa") or model.sdpa_backend != "auto":
        yield (
            f"--attention {config.model.attention} does not go with {why}, which "
            f"has a kernel of its own: leave it out, or {fix}"
        )


def ring_on_gpus(setting: Setting) -> Iterator[str]:
    """Reject head sizes that the GPU kernel does not take in low precision."""
    config, size = setting.config, setting.model.head_size
    low = dtypes(config.optim).computed.itemsize < FP32_BYTES
    on_gpus = config.sharding.context_parallel_method == "ring" and setting.device_type == "cuda"
    if on_gpus and low and (size % HEAD_MULTIPLE or size > LARGEST_HEAD):
        yield (
            f"--context-parallel-method ring on GPUs takes heads of {HEAD_MULTIPLE} to "
            f"{LARGEST_HEAD} in steps of {HEAD_MULTIPLE} in {config.optim.precision}, not {size}: "
            "give another --head-dim, or use --context-parallel-method ulysses with a "
            "--context-parallel that divides the heads"
        )


def context_length(setting: Setting) -> Iterator[str]:
    """Reject sequences that cannot be divided evenly."""
    chosen = setting.config.sharding
    pieces = chosen.context_parallel * (2 if chosen.context_parallel_method == "ring" else 1)
    if setting.seq_len % pieces:
        lower = setting.seq_len // pieces * pieces
        yield (
            f"--seq-len {setting.seq_len} cannot be divided into {pieces} equal shards for "
            f"--context-parallel {chosen.context_parallel}: use --seq-len "
            f"{lower or pieces}"
        )


def _heads_divide(model: ModelConfig, sharding: ShardingChoice) -> bool:
    """Return whether context-parallel ranks can divide the heads that tensor parallelism has left,
    with the keys and values that they need."""
    number, tensor = sharding.context_parallel, sharding.tensor_parallel
    heads, kv_heads = model.heads // tensor, max(1, model.kv_head_count // tensor)
    return heads % number == 0 and (kv_heads % number == 0 or number % kv_heads == 0)


RULES: Final[tuple[Rule, ...]] = (
    *(ranks, on_one_rank, tensor_shapes, tensor_rows, whole_matrices),
    *(context_heads, ring, ring_on_gpus, context_length),
)
