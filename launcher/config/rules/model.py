"""Refusals about the decoder: adapters, masks and recomputation."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.config.sharding import ShardingChoice
from launcher.model.checkpointing import kept_products
from launcher.model.foreign.config import ForeignConfig
from launcher.model.lora_config import BLOCK


def adapter_rank(setting: Setting) -> Iterator[str]:
    """Reject a rank larger than the narrowest matrix."""
    model, lora = setting.model, setting.model.lora
    if lora is None or isinstance(model, ForeignConfig):  # whose layers were asked
        return
    qkv, proj, up, down = model.linear_shapes
    widths = {"qkv": (*qkv[:1], *model.qkv_sizes), "proj": proj, "mlp": (*up[:1], *down)}
    most = min(min(widths[target]) for target in lora.targets)
    if lora.rank > most:
        yield (
            f"--lora-rank {lora.rank} is more than the {most} rows or columns of the narrowest "
            f"matrix that gets an adapter: use at most {most}, 8 is usual"
        )


def adapters(setting: Setting) -> Iterator[str]:
    """Reject adapters with what trains all weights, or whole projections."""
    config = setting.config
    if setting.model.lora is None:
        return
    flag = f"--lora-rank {setting.model.lora.rank}"
    if config.sharding.tensor_parallel > 1:
        yield (
            f"{flag} with --tensor-parallel {config.sharding.tensor_parallel}: adapters are not "
            f"sharded: leave --tensor-parallel out{_sharding_instead(config.sharding)}"
        )
    if config.optim.arithmetic.fp8_linears:
        yield (
            f"{flag} with --precision {config.optim.precision}, whose Linears have no adapters: "
            "use --precision bf16"
        )
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


def quantized_base(setting: Setting) -> Iterator[str]:
    """Reject --quantize-base without adapters, or with rows that its blocks do not divide."""
    model = setting.model
    if model.quantize_base == "none":
        return
    flag = f"--quantize-base {model.quantize_base}"
    if model.lora is None:
        yield f"{flag} leaves nothing to train: give --lora-rank, 8 is usual"
    if isinstance(model, ForeignConfig):  # whose layers were asked
        return
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


def masks(setting: Setting) -> Iterator[str]:
    """Reject --masks, which --init-from may imply, where weights are not held at zero."""
    if not setting.model.masks:
        return
    config = setting.config
    if setting.model.lora is not None:
        yield (
            f"--masks with --lora-rank {setting.model.lora.rank}: an adapter's product fills what "
            "was pruned: give --no-masks, or train all weights"
        )
    if config.sharding.tensor_parallel > 1:
        yield (
            f"--masks with --tensor-parallel {config.sharding.tensor_parallel}: masks are not "
            "sharded by columns: use --strategy fsdp or --zero 3, or give --no-masks"
        )
    if flags := config.sharding.flags_to("nvme"):
        yield (
            f"--masks with {flags}: weights are held at zero in memory, not in DeepSpeed's swap "
            "files: offload to cpu, or give --no-masks"
        )


def activation_offload(setting: Setting) -> Iterator[str]:
    """Reject --activation-checkpointing offload on a CPU."""
    chosen = setting.config.model.activation_checkpointing
    if chosen == "offload" and setting.device_type == "cpu":
        yield (
            "--activation-checkpointing offload moves activations from a GPU to host memory, and "
            "has no effect on a CPU: use full"
        )


def kept_outputs(setting: Setting) -> Iterator[str]:
    """Reject --activation-checkpointing keep=PRODUCTS and budget=SIZE where they have no effect."""
    config, chosen = setting.config, setting.model.checkpointing
    text = f"--activation-checkpointing {chosen.text}"
    listed = {name for word in chosen.pattern if "=" in word for name in kept_products(word)}
    budget = chosen.budget_bytes is not None
    if "attention" in listed and setting.model.dropout and setting.model.attention != "eager":
        yield (
            f"{text} with --dropout {setting.model.dropout}: a fused kernel that draws numbers is "
            "always recomputed: leave attention out of the list, or give --attention eager"
        )
    if (listed or budget) and config.optim.arithmetic.fp8_linears:
        yield (
            f"{text} with --precision {config.optim.precision}: its products cannot be told "
            "apart: use full or every=2"
        )
    if "mlp-up" in listed and config.model.mlp_tile is not None:
        yield (
            f"{text} with --mlp-tile {config.model.mlp_tile}: tiles recompute mlp-up themselves: "
            "leave one of them out"
        )
    if budget and config.model.mlp_tile is not None:
        yield (
            f"{text} with --mlp-tile {config.model.mlp_tile}: a budget weighs the whole MLP's "
            "product: use keep=qkv,attention or every=2 beside tiles"
        )
    if budget and config.loop.compiles:
        yield (
            f"{text} with --compile: the compiler keeps activations of its own choice, so that "
            "their bytes are unknown: use keep=qkv,attention,proj or every=2"
        )


RULES: Final[tuple[Rule, ...]] = (
    adapter_rank,
    adapters,
    quantized_base,
    masks,
    activation_offload,
    kept_outputs,
)
