"""Refusals about the optimizer, precision, schedule and compilation, and flags without effect."""

from collections.abc import Iterator, Mapping
from typing import Final

from launcher.config.graphs_choice import untested_with_graphs
from launcher.config.rules import Rule, Setting
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.config_checks import FP8_MULTIPLE
from launcher.model.foreign.config import ForeignConfig
from launcher.optim.choice import OptimChoice, steps_of_warmup
from launcher.optim.registry import OPTIMIZERS, moments_type
from launcher.util.flags import as_flags
from launcher.util.packages import version_of

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
SMALLEST_CHANGE_BF16 = 2**-8
"""A bf16 number moves only when it changes by about this, relative to itself."""


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


def optimizer(setting: Setting) -> Iterator[str]:
    """Reject optimizers of whole matrices under ZeRO, and states that NVMe offload cannot swap."""
    optim, stage = setting.config.optim, setting.stage
    name = optim.optimizer
    if stage and not OPTIMIZERS[name].elementwise:
        yield (
            f"--optimizer {name} updates whole matrices, but --zero {stage} shards parameters "
            "as flat ranges: use --strategy fsdp, or --optimizer adamw8bit"
        )
    if setting.config.sharding.offload_optimizer == "nvme" and (
        name not in ("adamw", "adam") or moments_type(optim) != "fp32"
    ):
        yield (
            "--offload-optimizer nvme swaps two moments in fp32: use --optimizer adamw or adam, "
            f"not {name} with {moments_type(optim)} states"
        )


def apollo_rank(setting: Setting) -> Iterator[str]:
    """Reject --apollo-rank beyond the narrowest matrix."""
    optim, model = setting.config.optim, setting.model
    if optim.optimizer != "apollo":
        return
    from launcher.optim.apollo import rank_of

    rank, columns = rank_of(optim), _fewest_columns(model)
    if rank > columns:
        yield (
            f"--apollo-rank {rank} is more than the {columns} columns of this model's narrowest "
            f"matrix: use at most {columns}, or --optimizer adamw"
        )


def _fewest_columns(model: ModelConfig) -> int:
    """Columns of the narrowest matrix of a block."""
    if not isinstance(model, ForeignConfig):
        return min(model.d_model, model.attention_dim, model.ffn_dim)
    from launcher.model.foreign.decoder import skeleton
    from launcher.optim.entry import is_hidden

    named = skeleton(model.document, model.attention).named_parameters()
    columns: list[int] = [p.shape[1] for name, p in named if is_hidden(name, p.shape)]
    return min(columns)


def moments(setting: Setting) -> Iterator[str]:
    """Reject moments' types and decay rates that do not fit the optimizer."""
    optim = setting.config.optim
    if optim.betas != OptimChoice().betas and optim.optimizer == "sgd":
        first, second = optim.betas
        yield f"--betas {first} {second}: --optimizer sgd has none: leave one of them out"
    if moments_type(optim) == "bf16" and 1 - optim.betas[1] < SMALLEST_CHANGE_BF16:
        yield (
            f"--betas {optim.betas[0]} {optim.betas[1]}: a second moment in bf16 would round such "
            f"small changes away: use at most {1 - SMALLEST_CHANGE_BF16}, or --optimizer adamw8bit"
        )


def in_backward(setting: Setting) -> Iterator[str]:
    """Reject --optimizer-in-backward where gradients outlive the backward."""
    optim, strategy = setting.config.optim, setting.config.sharding.strategy
    flag = "--optimizer-in-backward"
    if not optim.optimizer_in_backward:
        return
    if strategy == "ddp":
        yield (
            f"{flag} frees nothing under --strategy ddp, whose buckets hold all gradients until "
            "they are reduced: use --strategy fsdp, or leave it out"
        )
    if strategy == "zero":
        yield f"{flag} is not possible where DeepSpeed does the steps: use --strategy fsdp"
    if setting.accumulation > 1:
        yield (
            f"{flag} cannot accumulate {setting.accumulation} micro-batches, since the first one "
            "already updates the parameters: give a --global-batch of micro-batch x ranks"
        )
    if optim.clip > 0:
        yield (
            f"{flag} updates before the norm of all gradients is known, so it cannot clip to "
            f"{optim.clip}: give --clip 0"
        )
    if optim.precision == "fp16":
        yield (
            f"{flag} updates before it is known whether fp16 has overflowed: use --precision bf16"
        )


def bf16_pure(setting: Setting) -> Iterator[str]:
    """Reject bf16-pure without a suitable optimizer."""
    optim, sharding = setting.config.optim, setting.config.sharding
    if optim.precision != "bf16-pure":
        return
    if optim.optimizer not in ("adamw", "adamw8bit"):
        yield (
            "--precision bf16-pure needs an optimizer that updates bf16 weights in fp32, which "
            f"{optim.optimizer} does not: use --optimizer adamw or adamw8bit, or --precision bf16"
        )
    if setting.stage == 0:
        yield "--precision bf16-pure with --zero 0: use --strategy ddp, which is the same"
    if setting.stage and sharding.offload_optimizer != "none":
        yield (
            f"--offload-optimizer {sharding.offload_optimizer}: DeepSpeed offloads fp32 weights "
            "only, not those of --precision bf16-pure: use --precision bf16, or --strategy fsdp"
        )


def fp16(setting: Setting) -> Iterator[str]:
    """Reject --precision fp16 where DeepSpeed cannot train in it."""
    if setting.config.optim.precision != "fp16":
        return
    if setting.stage == 0:
        yield "--precision fp16 with --zero 0: use --strategy ddp, which is the same"
    if setting.stage and setting.device_type == "cpu":
        yield (
            f"--precision fp16 with --zero {setting.stage}: DeepSpeed trains in fp16 on GPUs "
            "only: use --precision bf16, or --strategy ddp or fsdp"
        )


def fp8(setting: Setting) -> Iterator[str]:
    """Reject --precision fp8 without such a GPU, or with sizes that its matmuls do not take."""
    config, model = setting.config, setting.model
    if config.optim.precision != "fp8":
        return
    if config.sharding.strategy == "zero":
        yield "--precision fp8 does not run in DeepSpeed's engine: use --strategy ddp or fsdp"
    if setting.device_type != "cuda":
        yield (
            "--precision fp8 needs a GPU with fp8 matmuls (compute capability 8.9: H100, L40S or "
            "newer), not a CPU: use --precision bf16"
        )
    sizes = {"micro-batch x tokens": config.data.micro_batch * setting.local_seq_len}
    if not isinstance(model, ForeignConfig):  # whose other linear layers stay as they are
        sizes |= {
            "d_model": model.d_model,
            "d_ff": model.ffn_dim,
            "heads x head_dim": model.attention_dim,
            "(heads + 2 kv_heads) x head_dim": model.qkv_dim,
            "mlp-tile": FP8_MULTIPLE if model.mlp_tile is None else model.mlp_tile,
        }
    for what, size in sizes.items():
        if size % FP8_MULTIPLE:
            yield (
                f"--precision fp8 multiplies matrices in tiles of {FP8_MULTIPLE}, and {what} is "
                f"{size}: make it a multiple, or use --precision bf16"
            )


def tf32(setting: Setting) -> Iterator[str]:
    """Reject --precision tf32 on a CPU."""
    if setting.config.optim.precision == "tf32" and setting.device_type != "cuda":
        yield (
            "--precision tf32 rounds matmuls on NVIDIA GPUs, and this runs on a CPU: use "
            "--precision fp32"
        )


def schedule(setting: Setting) -> Iterator[str]:
    """Reject --decay-steps longer than what follows the warm-up."""
    optim, steps = setting.config.optim, setting.config.loop.steps  # unknown with --epochs
    if optim.decay_steps is not None and steps is not None:
        warmup = steps_of_warmup(optim.warmup_steps or 0, steps)
        if optim.decay_steps > steps - warmup:
            yield (
                f"--decay-steps {optim.decay_steps} is more than the schedule's {steps} steps "
                f"less its warm-up of {warmup}: use at most {steps - warmup}, or more "
                "--steps or --epochs"
            )


def warmup(setting: Setting) -> Iterator[str]:
    """Reject a warm-up longer than the schedule."""
    optim, steps = setting.config.optim, setting.config.loop.steps  # unknown with --epochs
    if optim.warmup_steps is not None and steps is not None and optim.warmup_steps > steps:
        yield (
            f"--warmup-steps {optim.warmup_steps} is more than the {steps} steps of the schedule, "
            f"so the learning rate would never reach --lr {optim.recipe().lr:g}: use at most "
            f"{steps}, or more --steps or --epochs"
        )


def compiled(setting: Setting) -> Iterator[str]:
    """Reject --compile where it gains nothing or hides what is asked for."""
    config = setting.config
    if not config.loop.compiles:
        return
    if setting.stage == 3:
        # It runs, with the same losses: 30 graphs of a few operators each where a block has one.
        yield (
            "--compile with --zero 3: DeepSpeed fetches parameters in the middle of each block, "
            "which splits it into tiny graphs, so that compiling gains nothing: use --strategy "
            "fsdp, which shards the same"
        )
    version = version_of("torch")
    if config.sharding.tensor_parallel > 1 and str(version).startswith("2.11."):
        # losses are 3% off at the second step, whatever shards the rest
        yield (
            f"--compile with --tensor-parallel: torch {version} computes wrong gradients there: "
            "use torch 2.13, or leave --compile out"
        )
    if config.model.activation_checkpointing == "offload":
        yield (
            "--compile with --activation-checkpointing offload: blocks that move what they save "
            "are not compiled: use full or selective, or leave --compile out"
        )
    if config.measure.memory_trace and setting.device_type == "cpu":
        yield (
            "--compile with --memory-trace: the trace follows single operators, and with it torch "
            "would run the model uncompiled: leave one of them out"
        )


def recorded(setting: Setting) -> Iterator[str]:
    """Reject --cuda-graphs with what was never recorded."""
    if not setting.config.loop.cuda_graphs:
        return
    if setting.device_type != "cuda":
        yield "--cuda-graphs on needs a GPU, and this run is on a CPU: leave it out"
    for flags in untested_with_graphs(setting):
        yield f"--cuda-graphs on was not tested with {flags}: leave one of them out"


RULES: Final[tuple[Rule, ...]] = (
    without_effect,
    optimizer,
    apollo_rank,
    moments,
    in_backward,
    bf16_pure,
    fp16,
    fp8,
    tf32,
    schedule,
    warmup,
    compiled,
    recorded,
)
