"""RunConfig and a user's DeepSpeed JSON -> the config that DeepSpeed gets.

RunConfig owns batch sizes, accumulation, clipping, precision, optimizer and schedule; what a user's
file says of them has been adopted into it (`deepspeed_file`), and only the rest is merged here.
"""

from collections.abc import Mapping
from typing import Any

from launcher.config.deepspeed_file import passed_on
from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.strategies.offload_sizes import (
    PARAM_BUFFERS,
    largest_slice_count,
    optimizer_buffer_count,
    swap_buffer_count,
)
from launcher.strategies.parameters import parameters_of
from launcher.strategies.rank import Rank
from launcher.strategies.zero.fraction import sub_group_elements

JsonObject = dict[str, Any]
PRECISION_SECTIONS: Mapping[str, JsonObject] = {
    # Without the check stages 1 and 2 would train on with NaN.
    "bf16": {"enabled": True, "check_grad_overflow": True},
    # As torch.amp.GradScaler: one overflow halves the scale, 2000 good steps double it.
    "fp16": {"enabled": True, "loss_scale_window": 2000, "hysteresis": 1},
}
AIO = {
    "block_size": 2**20,  # what is smaller stays in host memory
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


def build_config(resolved: Resolved, *, world_size: int) -> JsonObject:
    """Return the config of `deepspeed.initialize` for `world_size` ranks that shard the states."""
    config, model = resolved.config, resolved.own_model
    ours = _owned(config, accumulation=resolved.accumulation)
    ours["zero_optimization"] = _zero_section(config, model)
    if config.sharding.offload_fraction < 1:
        elements = sub_group_elements(model, world_size)
        ours["zero_optimization"]["sub_group_size"] = elements
    if "nvme" in (config.sharding.offload_optimizer, config.sharding.offload_param):
        ours["aio"] = AIO
    merged = _merge(ours, passed_on(config.sharding.deepspeed))
    _add_nvme(merged["zero_optimization"], config, model, world_size)
    return merged


def zero_optimization(rank: Rank) -> JsonObject:
    """Return the section `zero_optimization` of the config, for a prediction."""
    config = build_config(rank.resolved, world_size=rank.world_size)
    section: JsonObject = config["zero_optimization"]
    return section


def accumulates_in_fp32(config: RunConfig) -> bool:
    """Return whether bf16 gradients are added up in fp32."""
    return config.optim.precision == "bf16" and config.sharding.grad_accum_dtype == "fp32"


def has_bf16_optimizer(config: RunConfig) -> bool:
    """Return whether stage 1 is DeepSpeed's BF16_Optimizer (runtime/engine.py,
    _do_optimizer_sanity_check)."""
    sharding = config.sharding
    on_device = sharding.offload_optimizer == "none"
    return sharding.zero == 1 and accumulates_in_fp32(config) and on_device


def _owned(config: RunConfig, *, accumulation: int) -> JsonObject:
    return {
        "train_micro_batch_size_per_gpu": config.data.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.clip,
        # The optimizer comes from launcher/optim/, on the device and offloaded alike.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,  # never: the loop prints its own lines
        # They would wait for the device twice a step, for unused figures.
        "timers": {"throughput": {"enabled": False}},
        **_precision_sections(config),
    }


def _precision_sections(config: RunConfig) -> JsonObject:
    arithmetic, sharding = config.optim.arithmetic, config.sharding
    name = arithmetic.computed
    if name == "fp32":
        return {}
    if sharding.zero == 0:
        # DeepSpeed's own bf16 mode runs an Adam step while it starts at stage 0.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    switches = dict.fromkeys(arithmetic.switches, True)
    sections: JsonObject = {name: PRECISION_SECTIONS[name] | switches}
    if name == "bf16":
        added = sharding.grad_accum_dtype if arithmetic.keeps_fp32 else name
        sections["data_types"] = {"grad_accum_dtype": added}
    return sections


def _zero_section(config: RunConfig, model: ModelConfig) -> JsonObject:
    sharding = config.sharding
    # One block at a time: DeepSpeed's default buckets of 5e8 elements are 2 GB each. Gradients are
    # reduced of what is trained, but whole blocks are fetched.
    bucket, fetched = model.trained_block_parameter_count, model.block_parameter_count
    section: JsonObject = {
        "stage": sharding.zero,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,  # stages 1 and 2 refuse an odd one
        "overlap_comm": config.loop.device == "cuda",
        "contiguous_gradients": True,
    }
    if sharding.zero == 3:
        section["stage3_prefetch_bucket_size"] = fetched
        # Biases and norms stay whole on every rank; matrices are sharded.
        vectors = (p.elements for p in parameters_of(model) if len(p.shape) == 1)
        section["stage3_param_persistence_threshold"] = max(vectors, default=0)  # OLMo has none
        # Room for the block that computes, one fetched ahead, and the embedding or head.
        section["stage3_max_live_parameters"] = 2 * fetched + model.vocab_size * model.d_model
        # A block's weights stay between their uses: the tiles of an MLP use them in turn.
        section["stage3_max_reuse_distance"] = fetched
    pin = config.sharding.pin_memory and config.loop.device == "cuda"
    if sharding.offload_optimizer != "none":
        section["offload_optimizer"] = {"device": sharding.offload_optimizer, "pin_memory": pin}
    if sharding.offload_param != "none":
        section["offload_param"] = {"device": sharding.offload_param, "pin_memory": pin}
    return section


def _add_nvme(section: JsonObject, config: RunConfig, model: ModelConfig, world_size: int) -> None:
    """Add buffers of the model's size; the engine adds the folder."""
    if config.sharding.offload_optimizer == "nvme":
        section["sub_group_size"] = swap_buffer_count(config)  # what a buffer holds
        section["offload_optimizer"]["buffer_count"] = optimizer_buffer_count(config)
    if config.sharding.offload_param == "nvme":
        section["sub_group_size"] = swap_buffer_count(config)
        section["offload_param"] |= {
            "buffer_count": PARAM_BUFFERS,
            "buffer_size": largest_slice_count(model, world_size),
            "max_in_cpu": 0,  # DeepSpeed would keep the first 1e9 elements in host memory
        }


def _merge(ours: JsonObject, theirs: Mapping[str, Any]) -> JsonObject:
    """Merge theirs over ours, without sections that this run has no use for (fp16, aio)."""
    merged = dict(ours)
    for key, value in theirs.items():
        if not isinstance(value, dict):
            merged[key] = value
        elif key in ours:
            merged[key] = _merge(ours[key], value)
    return merged
