"""What does not go with low-rank adapters."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.config.sharding import ShardingChoice
from launcher.model.lora_config import BLOCK


def rank(setting: Setting) -> Iterator[str]:
    """A rank beyond what a matrix has."""
    model, lora = setting.model, setting.model.lora
    if lora is None:
        return
    qkv, proj, up, down = model.linear_shapes
    widths = {"qkv": (*qkv[:1], *model.qkv_sizes), "proj": proj, "mlp": (*up[:1], *down)}
    most = min(min(widths[target]) for target in lora.targets)
    if lora.rank > most:
        yield (
            f"--lora-rank {lora.rank} is more than the {most} rows or columns of the narrowest "
            f"matrix that gets an adapter: use at most {most}, 8 is usual"
        )


def elsewhere(setting: Setting) -> Iterator[str]:
    """What works on weights that are trained, or on whole projections."""
    config = setting.config
    if setting.model.lora is None:
        return
    flag = f"--lora-rank {setting.model.lora.rank}"
    if config.sharding.tensor_parallel > 1:
        yield (
            f"{flag} with --tensor-parallel {config.sharding.tensor_parallel}: adapters are not "
            f"cut: leave --tensor-parallel out{_sharding_instead(config.sharding)}"
        )
    if config.optim.precision == "fp8":
        yield f"{flag} with --precision fp8, whose Linears have no adapters: use --precision bf16"
    if config.optim.optimizer == "apollo":
        yield (
            f"{flag} with --optimizer apollo, which projects gradients to a low rank that those of "
            "adapters have already: use --optimizer adamw"
        )
    if flags := config.sharding.flags_to("nvme"):
        yield (
            f"{flag} with {flags}: DeepSpeed swaps only what is trained, and that is little: use "
            "--strategy fsdp, or --zero 3 with --offload-param cpu"
        )


def quantized(setting: Setting) -> Iterator[str]:
    """--quantize-base."""
    model = setting.model
    if model.quantize_base == "none":
        return
    flag = f"--quantize-base {model.quantize_base}"
    if model.lora is None:
        yield f"{flag} leaves nothing to train: give --lora-rank, 8 is usual"
    for name, inner in zip(("qkv", "proj", "mlp", "mlp"), model.linear_shapes, strict=True):
        if inner[0] % BLOCK:
            yield (
                f"{flag} has one scale for each {BLOCK} elements of a row, and the rows of {name} "
                f"have {inner[0]}: leave it out for this model"
            )


def _sharding_instead(sharding: ShardingChoice) -> str:
    if sharding.strategy == "fsdp" or sharding.zero == 3:
        return ", the run shards frozen weights already"
    return ", and use --strategy fsdp or --zero 3, which shard frozen weights, too"


RULES: Final[tuple[Rule, ...]] = (rank, elsewhere, quantized)
