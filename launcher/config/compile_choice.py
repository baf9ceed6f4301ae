"""`--compile auto`: blocks are compiled where that was tested and the run is long enough for it."""

from collections.abc import Iterator, Mapping
from typing import Final

from launcher.config.rules import Setting
from launcher.config.schema import RunConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.util.flags import as_flags

Values = Mapping[str, tuple[object, ...] | None]
"""Field -> values of it; None for its default."""
COMPILE_S: Final = 40.0
"""Taken for what compiling takes of a host. First steps of bench/results/step_budget.md took 12 to
39 s on two cores, an evaluation compiles another graph, and whole runs on an H200 took 10 to 14 s
longer."""
KEPT_SHARE: Final = 0.99
"""Below 1, so that the compiler keeps nothing that it can fuse into a kernel of the backward: no
product is computed twice (bench/results/step_budget.md: Llama's blocks 9.2 GiB, not 11.9)."""
# What fused kernels save per token, block and element of the model's width, as bytes at the rate of
# memory: steps of an H200, not compiled less compiled (bench/results/gpu-h200).
SAVED_BYTES_GPT2: Final = 12
"""GELU's backward, and sums of biases: 51.6 less 50.8 ms (`default/run`, `compile/bf16`). Nothing
under FSDP: 54.9 less 67.8 ms (`strategies/fsdp`, `compile/fsdp`)."""
SAVED_BYTES_LLAMA: Final = 0
"""50.6 less 52.4 ms (`default/llama`, `default/llama-compiled`): each of RoPE, RMSNorm and SwiGLU
is one kernel without a compiler, too. Compiled blocks take less memory."""
SAVED_BYTES_FP8: Final = 1900
"""183.6 less 54.1 ms (`precision/fp8`, `compile/fp8`): casts and scales are fused."""
SAVED_BYTES_DECODERS: Final[Mapping[str, int]] = {
    **{"phi3": 500, "olmo2": 420, "gemma2": 1200, "gemma3_text": 1400},
}
"""model_type of a decoder of transformers -> the same: 54.4 less 36.8 ms, 56.4 less 41.4, 82.6 less
41.6, 84.3 less 33.1 (`decoders`)."""
MEMORY_BYTES_PER_S: Final = 4.3e12
"""An H200 reaches nine tenths of its data sheet; slower memory saves more time."""

# Trained in tests/nullgpu; losses are compared with uncompiled ones by tests/distributed, but for
# fp8, which needs a GPU.
_TESTED: Final[Values] = {
    **dict.fromkeys(
        (
            *("init_from", "lora_rank", "quantize_base", "masks", "dropout", "window", "mlp_tile"),
            *("document_attention", "zero", "deepspeed", "offload_param", "offload_optimizer"),
            *("replicate", "context_parallel", "tensor_parallel", "reduce_each_micro_batch"),
            *("optimizer_in_backward", "memory_trace"),
        )
    ),
    "strategy": ("single", "ddp", "fsdp"),
    "precision": ("bf16", "fp8"),
    "activation_checkpointing": ("none", "selective", "full"),
    "attention": ("auto", "sdpa"),
}
_NOT_OF_DECODERS: Final[Values] = {
    **{"precision": ("fp8",), "activation_checkpointing": ("selective", "full")},
}
"""Values of these that were not tested with decoders of transformers."""
_DEFAULT: Final = RunConfig()


def with_compile(setting: Setting, before: bool | None) -> tuple[Setting, str]:
    """Choose what `--compile auto` is, and return the reason on a GPU.

    Args:
        before: what the run had that is resumed; None without one.
    """
    if setting.config.loop.compile is not None:
        return setting, ""
    compiles, reason = False, ""
    if setting.device_type == "cuda":
        compiles, reason = _choose(setting, before)
    return setting.changed(compile=compiles), reason


def is_tested(setting: Setting) -> bool:
    """Return whether compiled blocks were tested with all of this, and what they gain measured."""
    return next(_untested(setting), None) is None and _saved_bytes(setting) is not None


def _choose(setting: Setting, before: bool | None) -> tuple[bool, str]:
    untested = next(_untested(setting), None)
    if untested is not None:
        return False, f"auto: not tested with {untested}"
    if before is not None:
        return before, "auto: as in the run that is resumed"
    saved_bytes = _saved_bytes(setting)
    if saved_bytes is None:
        return False, "auto: what it gains is measured for blocks of GPT-2 and Llama, and in fp8"
    if saved_bytes == 0:
        return False, "auto: saves no time"
    loop = setting.config.loop
    if loop.steps is None or loop.max_minutes is not None:
        flag = "--epochs" if loop.steps is None else "--max-minutes"
        return False, f"auto: {flag} leaves the number of steps open"
    steps = min(loop.steps, loop.stop_after or loop.steps)
    saved_s = steps * _block_elements(setting) * saved_bytes / MEMORY_BYTES_PER_S
    pays = saved_s > COMPILE_S
    return pays, (
        f"auto: saves about {_seconds(saved_s)} in {steps:,} steps, and compiling takes about "
        f"{COMPILE_S:.0f} s"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _saved_bytes(setting: Setting) -> int | None:
    """Return the bytes that compiled blocks do not move, per token, block and element of the width;
    None where that was not measured."""
    model = setting.model
    if isinstance(model, ForeignConfig):
        return SAVED_BYTES_DECODERS.get(model.fields.get("model_type", ""))
    if setting.config.optim.arithmetic.fp8_linears:
        return SAVED_BYTES_FP8
    kind = (model.position, model.norm, model.activation)
    sharded = setting.config.sharding.strategy == "fsdp"
    measured = {
        ("rope", "rms", "swiglu"): SAVED_BYTES_LLAMA,
        ("learned", "layer", "gelu"): 0 if sharded else SAVED_BYTES_GPT2,
    }
    return measured.get(kind)


def _block_elements(setting: Setting) -> int:
    """Return the tokens of a rank's step, times blocks and their width."""
    model, micro_batch = setting.model, setting.config.data.micro_batch
    tokens = setting.accumulation * micro_batch * setting.local_seq_len
    return tokens * model.layers * model.d_model


def _untested(setting: Setting) -> Iterator[str]:
    """Yield each choice that was not tested with compiled blocks on a GPU."""
    config, model = setting.config, setting.model
    foreign = isinstance(model, ForeignConfig)
    if foreign and _saved_bytes(setting) is None:
        yield "this decoder of transformers"
    yield from untested(config, _TESTED, _NOT_OF_DECODERS if foreign else {})


def untested(config: RunConfig, tested: Values, not_of_decoders: Values) -> Iterator[str]:
    """Yield each field, as a flag, whose value is not among the tested ones."""
    for name, values in tested.items():
        value = config.get(name)
        if value not in (values or (_DEFAULT.get(name),)):
            yield as_flags({name: value})
        elif value in (not_of_decoders.get(name) or ()):
            yield f"{as_flags({name: value})} and a decoder of transformers"
