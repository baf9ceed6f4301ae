"""RunConfig and a user's DeepSpeed JSON -> the config that DeepSpeed gets.

RunConfig owns batch sizes, accumulation, clipping, precision, optimizer and schedule. A user's
file may carry them as "auto" or with the same value; another value is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config import RunConfig
from launcher.errors import UserError
from launcher.flags import flag, read_small_file
from launcher.model.config import ModelConfig
from launcher.offload_choice import OffloadChoice
from launcher.sizes import parse_bytes
from launcher.strategies.offload_sizes import (
    PARAM_BUFFERS,
    largest_slice_count,
    optimizer_buffer_count,
    swap_buffer_count,
)

AUTO = "auto"
PRECISION_SECTIONS = ("fp16", "bf16", "amp", "torch_autocast", "data_types")
JsonObject = dict[str, Any]


def read_file(path: Path) -> JsonObject:
    """Read a DeepSpeed JSON file.

    Raises:
        UserError: missing, not JSON, or not an object.
    """
    try:
        content = json.loads(read_small_file(path, what="a JSON file"))
    except UserError as error:
        raise UserError(f"--deepspeed {error}") from None
    except (ValueError, RecursionError) as error:  # or too many digits, or nested too deep
        raise UserError(f"--deepspeed {path}: not valid JSON, correct it: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--deepspeed {path}: holds {content!r:.40}, but must be a JSON object")
    return content


def sharding_of_file(path: Path) -> dict[str, Any]:
    """The sharding a file asks for, as RunConfig fields: zero, offload_optimizer, offload_param.

    What the file does not say, or leaves "auto", is not in the result: the flags decide it.

    Raises:
        UserError: a stage or offload device that does not exist.
    """
    zero = _section(read_file(path), "zero_optimization", path)
    found: dict[str, Any] = {}
    stage = zero.get("stage", AUTO)
    if stage != AUTO and (stage not in (0, 1, 2, 3) or isinstance(stage, bool)):
        raise UserError(
            f"--deepspeed {path}: zero_optimization.stage is {stage!r}, but must be 0, 1, 2 or 3"
        )
    if stage != AUTO:
        found["zero"] = stage
    for name in ("offload_optimizer", "offload_param"):
        device = _section(zero, name, path).get("device", AUTO)
        if device not in (AUTO, "none", "cpu", "nvme"):
            raise UserError(
                f"--deepspeed {path}: zero_optimization.{name}.device is {device!r}, "
                "but must be none, cpu or nvme"
            )
        if device != AUTO:
            found[name] = device
        folder = _section(zero, name, path).get("nvme_path", AUTO)
        if device == "nvme" and folder not in (AUTO, None):
            found["nvme_path"] = Path(folder)
    return found


def build_config(
    config: RunConfig, model: ModelConfig, *, accumulation: int, world_size: int
) -> JsonObject:
    """The config for `deepspeed.initialize`, from a resolved RunConfig.

    Raises:
        UserError: the user's file contradicts RunConfig.
    """
    path = config.sharding.deepspeed
    file = read_file(path) if path else {}
    if path:
        _check_owned(config, file, path, accumulation=accumulation, world_size=world_size)
    ours = _owned(config, accumulation=accumulation)
    ours["zero_optimization"] = _zero_section(config, model, file, world_size)
    if "nvme" in (config.sharding.offload_optimizer, config.sharding.offload_param):
        ours["aio"] = _merge(_aio_section(config.offload), file.get("aio", {}))
    dropped = ("optimizer", "scheduler", "train_batch_size", *PRECISION_SECTIONS)
    rest = {k: v for k, v in file.items() if k not in ours and k not in dropped and v != AUTO}
    return {**rest, **ours}


def _owned(config: RunConfig, *, accumulation: int) -> JsonObject:
    sharding = config.sharding
    owned: JsonObject = {
        "train_micro_batch_size_per_gpu": config.data.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.clip,
        # The optimizer comes from launcher/optim.py, on the device and offloaded alike.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    if config.optim.precision == "bf16":
        if sharding.zero == 0:
            # DeepSpeed's own bf16 mode runs an Adam step while it starts at stage 0.
            owned["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        else:
            # Otherwise stages 1 and 2 would train on with NaN.
            owned["bf16"] = {"enabled": True, "check_grad_overflow": True}
            owned["data_types"] = {"grad_accum_dtype": sharding.grad_accum_dtype}
    elif config.optim.precision == "bf16-pure":
        owned["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
        owned["data_types"] = {"grad_accum_dtype": "bf16"}
    elif config.optim.precision == "fp16":
        # As torch.amp.GradScaler: one overflow halves the scale, 2000 good steps double it.
        owned["fp16"] = {"enabled": True, "loss_scale_window": 2000, "hysteresis": 1}
    return owned


def _zero_section(
    config: RunConfig, model: ModelConfig, file: JsonObject, world_size: int
) -> JsonObject:
    sharding = config.sharding
    # One block at a time: DeepSpeed's default buckets of 5e8 elements are 2 GB each.
    bucket = sharding.bucket or model.block_parameter_count
    section: JsonObject = {
        "stage": sharding.zero,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": config.loop.device == "cuda",
        "contiguous_gradients": True,
    }
    if sharding.zero == 3:
        section["stage3_prefetch_bucket_size"] = bucket
        # Biases and norms stay whole on every rank; matrices are sharded.
        section["stage3_param_persistence_threshold"] = model.ffn_dim
        section["stage3_max_live_parameters"] = 2 * bucket + model.vocab_size * model.d_model
        section["stage3_max_reuse_distance"] = bucket
    pin = config.offload.pin_memory and config.loop.device == "cuda"
    if sharding.offload_optimizer != "none":
        section["offload_optimizer"] = {"device": sharding.offload_optimizer, "pin_memory": pin}
    if sharding.offload_param != "none":
        section["offload_param"] = {"device": sharding.offload_param, "pin_memory": pin}
    _add_nvme(section, config, model, world_size)
    return _merge(section, file.get("zero_optimization", {}))


def _add_nvme(section: JsonObject, config: RunConfig, model: ModelConfig, world_size: int) -> None:
    """Buffers of the model's size; the engine adds the folder."""
    offload = config.offload
    if config.sharding.offload_optimizer == "nvme":
        section["sub_group_size"] = swap_buffer_count(offload)
        section["offload_optimizer"] |= {
            "buffer_count": optimizer_buffer_count(offload),
            "pipeline_read": offload.nvme_overlap,
            "pipeline_write": offload.nvme_overlap,
        }
    if config.sharding.offload_param == "nvme":
        section["sub_group_size"] = swap_buffer_count(offload)
        section["offload_param"] |= {
            "buffer_count": PARAM_BUFFERS,
            "buffer_size": largest_slice_count(model, world_size),
            "max_in_cpu": 0,  # DeepSpeed would keep the first 1e9 elements in host memory
        }


def _aio_section(offload: OffloadChoice) -> JsonObject:
    return {
        "block_size": parse_bytes(offload.nvme_block, "--nvme-block"),
        "queue_depth": offload.nvme_queue_depth,
        "intra_op_parallelism": offload.nvme_threads,
        "single_submit": False,
        "overlap_events": True,
    }


def _merge(ours: JsonObject, theirs: Mapping[str, Any]) -> JsonObject:
    """Theirs over ours, except where theirs says auto."""
    merged = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, dict):
            merged[key] = _merge(merged.get(key, {}), value)
        elif value != AUTO:
            merged[key] = value
    return merged


def _check_owned(
    config: RunConfig, file: JsonObject, path: Path, *, accumulation: int, world_size: int
) -> None:
    data, optim, sharding = config.data, config.optim, config.sharding
    bf16 = optim.precision in ("bf16", "bf16-pure")
    in_bf16 = optim.precision == "bf16-pure"
    owned = (
        ("train_micro_batch_size_per_gpu", data.micro_batch, "micro_batch"),
        ("train_batch_size", data.micro_batch * accumulation * world_size, "global_batch"),
        ("gradient_accumulation_steps", accumulation, "global_batch"),
        ("gradient_clipping", optim.clip, "clip"),
        ("bf16.enabled", bf16, "precision"),
        ("fp16.enabled", optim.precision == "fp16", "precision"),
        ("amp.enabled", False, "precision"),
        ("torch_autocast.enabled", bf16 and sharding.zero == 0, "precision"),
        (
            "data_types.grad_accum_dtype",
            "bf16" if in_bf16 else sharding.grad_accum_dtype,
            "grad_accum_dtype",
        ),
        ("optimizer.params.lr", optim.lr, "lr"),
        ("optimizer.params.betas", list(optim.betas), "betas"),
        ("optimizer.params.eps", optim.eps, "eps"),
        ("optimizer.params.weight_decay", optim.weight_decay, "weight_decay"),
    )
    for name, ours, field in owned:
        section = file
        *parents, key = name.split(".")
        for parent in parents:
            section = _section(section, parent, path)
        theirs = section.get(key)
        if theirs not in (AUTO, None, ours):
            raise UserError(
                f"--deepspeed {path}: {name} is {theirs!r}, but {flag(field)} makes it {ours!r}: "
                'set it to "auto" in the file, or change the flag'
            )
    kind = _section(file, "optimizer", path).get("type", AUTO)
    # DeepSpeed's "Adam" decays as AdamW does, unless told otherwise.
    same = ("adam", "adamw") if optim.optimizer == "adamw" else (optim.optimizer,)
    if str(kind).lower() not in (AUTO, *same):
        raise UserError(
            f"--deepspeed {path}: optimizer.type is {kind!r}, but --optimizer makes it "
            f'{optim.optimizer!r}: remove the optimizer section or set it to "auto"'
        )
    for key, theirs in _section(_section(file, "scheduler", path), "params", path).items():
        if theirs != AUTO:
            raise UserError(
                f"--deepspeed {path}: scheduler.params.{key} is {theirs!r}, but the schedule is "
                'set by --lr, --warmup-steps and --steps: set it to "auto" or remove the scheduler'
            )


def _section(parent: JsonObject, name: str, path: Path) -> JsonObject:
    value = parent.get(name, {})
    if value in (AUTO, None):
        return {}
    if not isinstance(value, dict):
        raise UserError(f"--deepspeed {path}: {name} is {value!r}, but must be a JSON object")
    return value
