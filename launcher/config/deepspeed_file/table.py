"""Every key of a DeepSpeed file that shardscale knows, and what becomes of it. A key is one of

- adopted: it is one of our own fields, and the file is a source of its value;
- passed: DeepSpeed gets it as it is; proven by losses equal to those without it;
- idle: without effect here, because shardscale does that itself; said when it is switched on;
- refused: switched on it would train otherwise than it says; the sentence names the way out.

Written for DeepSpeed 0.19.8; a test compares its config classes with this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AUTO = "auto"
"""As if the key were not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Handling of one key."""

    kind: str
    fate: Literal["adopted", "passed", "idle", "refused"]
    field: str = ""
    """The field of RunConfig that an adopted key is; "" where several keys make one field."""
    why: str = ""
    """Who does it instead, or the way out."""
    harmless: tuple[object, ...] = ()
    """Values of an idle or refused key that change nothing. Those that switch a thing off do not
    either, unless True is the value that changes nothing."""

    def is_harmless(self, value: object) -> bool:
        """Return whether an idle or refused key's value asks for what happens anyway."""
        return value in self.harmless or (is_off(value) and True not in self.harmless)


def adopted(kind: str, field: str = "") -> Key:
    """Make a key that sets one of our fields."""
    return Key(kind=kind, fate="adopted", field=field)


def passed(kind: str) -> Key:
    """Make a key that DeepSpeed gets unchanged."""
    return Key(kind=kind, fate="passed")


def idle(why: str = "", *harmless: object) -> Key:
    """Make a key without effect."""
    return Key(kind="any", fate="idle", why=why, harmless=harmless)


def refused(why: str, *harmless: object) -> Key:
    """Make a key that is rejected unless it asks for nothing."""
    return Key(kind="any", fate="refused", why=why, harmless=harmless)


def is_off(value: object) -> bool:
    """Return whether a section or switch asks for nothing."""
    if isinstance(value, dict):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(map(is_off, value.values()))
    return value in (None, False, 0, "", "none", AUTO) or value == []


def _all(key: Key, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), key)


_NOT_HERE = refused("remove it")
_NO_DIMENSION = "there is no such dimension here, remove it"
_OURS = "the dimensions are --tensor-parallel and --context-parallel, remove it"
_STAGE_1 = "DeepSpeed takes it at stage 1 only, remove it"
_LOSSES_DIFFER = refused("losses differ, remove it")

TOP: dict[str, Key] = {
    "train_batch_size": adopted("count", "global_batch"),
    "train_micro_batch_size_per_gpu": adopted("count", "micro_batch"),
    "gradient_accumulation_steps": adopted("count"),
    "gradient_clipping": adopted("number", "clip"),
    "communication_data_type": adopted("text"),
    **_all(
        idle("every run measures this"),
        "wall_clock_breakdown memory_breakdown flops_profiler timers dump_state",
    ),
    **_all(idle("checkpoints are shardscale's own"), "checkpoint nebula datastates_ckpt"),
    **_all(idle("--report-to"), "monitor_config tensorboard wandb comet"),
    **_all(idle(), "log_level disable_python_gc"),
    "comms_logger": idle("plan shows traffic"),
    "comms_config": idle("plan shows traffic", {"verbose": False}),
    "csv_monitor": idle("the run folder's records"),
    "steps_per_print": idle("--log-every"),
    "vocabulary_size": idle("--vocab-size"),
    "activation_checkpointing": idle("use --activation-checkpointing"),
    "dataloader_drop_last": idle("batches are always whole"),
    "disable_allgather": idle("DeepSpeed no longer reads it"),
    "use_data_before_expert_parallelism": idle("there are no experts"),
    "seq_parallel_communication_data_type": idle(_OURS),
    "zero_allow_untested_optimizer": idle("", True),
    "zero_force_ds_cpu_optimizer": idle("", True, False),
    "prescale_gradients": refused(_STAGE_1),
    "gradient_predivide_factor": refused(_STAGE_1, 1),
    "gradient_allreduce_op": refused("gradients are averaged", "mean"),
    "managed_gradient_accumulation": refused("remove it", True),
    "amp": refused('write "bf16" or "fp16" instead'),
    "torch_autocast": refused('write "bf16" instead'),
    "fp8": refused("use --precision fp8 with --strategy fsdp"),
    "sparse_attention": refused("use --window"),
    "elasticity": refused("any checkpoint resumes on any number of ranks, remove it"),
    "autotuning": refused("use shardscale plan, or --micro-batch auto"),
    "compile": refused("use --compile, or --strategy fsdp --compile", {"disable": True}),
    **_all(
        _NOT_HERE,
        "quantize_training weight_quantization compression_training progressive_layer_drop "
        "eigenvalue sparse_gradients graph_harvesting hybrid_engine",
    ),
    **_all(
        refused("batches are shardscale's own, remove it"),
        "curriculum_learning data_efficiency data_routing random_ltd",
    ),
    **_all(refused(_NO_DIMENSION), "pipeline expert_parallel"),
    **_all(refused(_OURS), "autotp sequence_parallel"),
    "tensor_parallel": refused(_OURS, {"autotp_size": 1}, {"tp_size": 1}),
    "autotp_size": refused(_OURS, 0, 1),
    "sequence_parallel_size": refused(_OURS, 1),
}
"""Keys of the whole file, and sections that are looked at as one."""

ZERO: Mapping[str, Key] = {
    "stage": adopted("stage", "zero"),
    **_all(
        passed("flag"),
        "contiguous_gradients reduce_scatter allgather_partitions overlap_comm "
        "use_multi_rank_bucket_allreduce parameter_alignment memory_efficient_linear "
        "ignore_unused_parameters enable_sanity_checks stage3_use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential",
    ),
    "reduce_bucket_size": passed("count"),
    "allgather_bucket_size": passed("even"),
    **_all(
        passed("size"),
        "sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_module_granularity_threshold",
    ),
    # DeepSpeed would reorder its partitions, but not what tells a checkpoint where they lie.
    "round_robin_gradients": idle("checkpoints need the parameters' own order"),
    "load_from_fp32_weights": idle("checkpoints are shardscale's own", True),
    **_all(
        idle("checkpoints are shardscale's own"),
        "elastic_checkpoint ignore_missing_optim_state pipeline_loading_checkpoint",
    ),
    **_all(idle("", True), "stage3_gather_16bit_weights_on_model_save override_module_apply"),
    "log_trace_cache_warnings": idle(),
    "save_muon_momentum_buffer_in_memory": idle("DeepSpeed's own Muon is never used"),
    "compute_grad_norm": refused("every step records its norm, set it to true", True),
    "zero_hpz_partition_size": refused("DeepSpeed never fills that copy, remove it", 0, 1),
    **_all(
        _LOSSES_DIFFER,
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "zeropp_loco_param zenflow",
    ),
    "mics_shard_size": refused("use --strategy fsdp --replicate", -1),
    "mics_hierarchical_params_gather": refused("use --strategy fsdp --replicate"),
    **_all(_NOT_HERE, "legacy_stage1 leaf_module"),
}

OFFLOAD: dict[str, Key] = {
    "nvme_path": adopted("text", "nvme_path"),
    "pin_memory": adopted("flag", "pin_memory"),
    "buffer_count": idle("sized to the model"),
}
OFFLOAD_PARAM = OFFLOAD | {
    "device": adopted("device", "offload_param"),
    "buffer_size": idle("sized to the model"),
    "max_in_cpu": idle("sized to the model"),
}
OFFLOAD_OPTIMIZER = OFFLOAD | {
    "device": adopted("device", "offload_optimizer"),
    "pipeline_read": passed("flag"),
    "pipeline_write": passed("flag"),
    "fast_init": idle(),
    "ratio": adopted("ratio", "offload_fraction"),
    "super_offload": _NOT_HERE,
    "cpuadam_cores_perc": idle("OMP_NUM_THREADS"),
}
AIO: Mapping[str, Key] = {
    "block_size": passed("count"),
    "queue_depth": passed("count"),
    "intra_op_parallelism": passed("count"),
    "single_submit": passed("flag"),
    "overlap_events": passed("flag"),
    "use_gds": _NOT_HERE,
}

BF16: Mapping[str, Key] = {
    "enabled": adopted("flag"),
    "bf16_master_weights_and_grads": adopted("flag"),
    "bf16_optimizer_states": adopted("flag"),
    "check_grad_overflow": refused("steps with NaN are always skipped, set it to true", True),
    "immediate_grad_update": idle(),
    # Real files carry those of fp16 here; in bf16 nothing is scaled.
    **_all(
        idle("bf16 has none"),
        "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    ),
}
FP16: Mapping[str, Key] = {
    "enabled": adopted("flag"),
    "loss_scale": passed("number"),
    "initial_scale_power": passed("power"),
    "loss_scale_window": passed("count"),
    "hysteresis": passed("count"),
    "consecutive_hysteresis": passed("flag"),
    "min_loss_scale": passed("count"),
    "auto_cast": idle("inputs are token numbers"),
    "fp16_master_weights_and_grads": refused("master weights are fp32, set it to false"),
}
DATA_TYPES: Mapping[str, Key] = {
    "grad_accum_dtype": adopted("type", "grad_accum_dtype"),
    "param_dtype": refused("use bf16 or fp16"),
    "buffer_dtype": _NOT_HERE,
    "keep_in_fp32_modules": _NOT_HERE,
}

OPTIMIZER: Mapping[str, Key] = {
    "type": adopted("text"),
    "legacy_fusion": idle(),
    "params.lr": adopted("number", "lr"),
    "params.betas": adopted("pair", "betas"),
    "params.eps": adopted("number", "eps"),
    "params.weight_decay": adopted("number", "weight_decay"),
    "params.momentum": adopted("number", "momentum"),
    "params.adam_w_mode": adopted("flag"),
    **_all(idle("", True, False), "params.torch_adam params.fused params.foreach"),
    "params.bias_correction": refused("moments are always corrected, set it to true", True),
    **_all(refused("set it to false"), "params.amsgrad params.nesterov"),
    "params.dampening": refused("set it to 0"),
    "params.max_grad_norm": refused("write gradient_clipping"),
    "params.fp32_optimizer_states": refused("use --moments-dtype", True),
}
SCHEDULER: Mapping[str, Key] = {
    "type": adopted("text"),
    **_all(
        refused("the rate starts at 0, set it to 0"),
        "params.warmup_min_lr params.warmup_min_ratio",
    ),
    "params.warmup_max_lr": adopted("number", "lr"),
    "params.warmup_num_steps": adopted("size", "warmup_steps"),
    "params.warmup_type": adopted("text"),
    "params.total_num_steps": adopted("count"),
    "params.cos_min_ratio": adopted("number"),
    "params.last_batch_iteration": idle("use --resume", -1),
}


_SECTIONS: Mapping[str, Mapping[str, Key]] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "aio": AIO,
    "bf16": BF16,
    "fp16": FP16,
    "data_types": DATA_TYPES,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
}
KEYS: Mapping[str, Key] = TOP | {
    f"{section}.{name}": key for section, keys in _SECTIONS.items() for name, key in keys.items()
}
"""All of them, by their place: `zero_optimization.stage`."""

SECTIONS = {name[:end] for name in KEYS for end, letter in enumerate(name) if letter == "."}

_ZERO = "zero_optimization."
RENAMED: Mapping[str, str] = {
    "bfloat16": "bf16",
    "allgather_size": _ZERO + "allgather_bucket_size",
    "aio.thread_count": "aio.intra_op_parallelism",
    _ZERO + "cpu_offload": _ZERO + "offload_optimizer.device",
    _ZERO + "cpu_offload_param": _ZERO + "offload_param.device",
    _ZERO + "cpu_offload_params": _ZERO + "offload_param.device",
    _ZERO + "cpu_offload_use_pin_memory": _ZERO + "offload_optimizer.pin_memory",
    _ZERO + "stage3_gather_fp16_weights_on_model_save": _ZERO
    + "stage3_gather_16bit_weights_on_model_save",
    # Names that DeepSpeed takes beside its own; a file of each kind is about.
    **{
        _ZERO + name.removeprefix("stage3_"): _ZERO + name
        for name in ZERO
        if name.startswith("stage3_")
    },
}
"""Retired names and second ones -> the name in the table."""
