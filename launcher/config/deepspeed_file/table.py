"""Every key of a DeepSpeed file that shardscale knows, and what becomes of it.

Written for DeepSpeed 0.19.8; a test compares its config classes with this table.
"""

from collections.abc import Mapping

from launcher.config.deepspeed_file.key import Key, adopted, idle, passed, refused

_ALREADY_MEASURED = "every run measures this"
_OWN_CHECKPOINTS = "checkpoints are shardscale's own"
_NOT_HERE = "remove it"
_NO_DIMENSION = "ranks share data only, remove it"
_OWN_BATCHES = "batches are shardscale's own, remove it"

TOP: Mapping[str, Key] = {
    "train_batch_size": adopted("count", "global_batch"),
    "train_micro_batch_size_per_gpu": adopted("count", "micro_batch"),
    "gradient_accumulation_steps": adopted("count"),
    "gradient_clipping": adopted("number", "clip"),
    "communication_data_type": adopted("text"),
    "seq_parallel_communication_data_type": idle(_NO_DIMENSION),
    "prescale_gradients": refused("DeepSpeed takes it at stage 1 only, remove it"),
    "gradient_predivide_factor": refused("DeepSpeed takes it at stage 1 only, remove it", 1),
    "gradient_allreduce_op": refused("gradients are averaged", "mean"),
    "managed_gradient_accumulation": refused(_NOT_HERE, True),
    "zero_allow_untested_optimizer": idle("", True),
    "zero_force_ds_cpu_optimizer": idle("", True, False),
    "steps_per_print": idle("--log-every"),
    "wall_clock_breakdown": idle(_ALREADY_MEASURED),
    "memory_breakdown": idle(_ALREADY_MEASURED),
    "flops_profiler": idle(_ALREADY_MEASURED),
    "comms_logger": idle("plan shows traffic"),
    "comms_config": idle("plan shows traffic", {"verbose": False}),
    "monitor_config": idle("--tensorboard"),
    "tensorboard": idle("--tensorboard"),
    "wandb": idle("--tensorboard"),
    "csv_monitor": idle("the run folder's records"),
    "comet": idle("--tensorboard"),
    "timers": idle(_ALREADY_MEASURED),
    "dump_state": idle(_ALREADY_MEASURED),
    "log_level": idle(),
    "disable_python_gc": idle(),
    "vocabulary_size": idle("--vocab-size"),
    "dataloader_drop_last": idle("batches are always whole"),
    "disable_allgather": idle("DeepSpeed no longer reads it"),
    "use_data_before_expert_parallelism": idle("there are no experts"),
    "activation_checkpointing": idle("use --activation-checkpointing"),
    "checkpoint": idle(_OWN_CHECKPOINTS),
    "nebula": idle(_OWN_CHECKPOINTS),
    "datastates_ckpt": idle(_OWN_CHECKPOINTS),
    "amp": refused('write "bf16" or "fp16" instead'),
    "torch_autocast": refused('write "bf16" instead'),
    "fp8": refused("use --precision fp8 with --strategy fsdp"),
    "quantize_training": refused(_NOT_HERE),
    "weight_quantization": refused(_NOT_HERE),
    "compression_training": refused(_NOT_HERE),
    "progressive_layer_drop": refused(_NOT_HERE),
    "eigenvalue": refused(_NOT_HERE),
    "sparse_attention": refused("use --window"),
    "sparse_gradients": refused(_NOT_HERE),
    "graph_harvesting": refused(_NOT_HERE),
    "curriculum_learning": refused(_OWN_BATCHES),
    "data_efficiency": refused(_OWN_BATCHES),
    "data_routing": refused(_OWN_BATCHES),
    "random_ltd": refused(_OWN_BATCHES),
    "elasticity": refused("any checkpoint goes on on any number of ranks, remove it"),
    "autotuning": refused("use shardscale plan, or --micro-batch auto"),
    "hybrid_engine": refused(_NOT_HERE),
    "compile": refused("use --compile, or --strategy fsdp --compile", {"disable": True}),
    "pipeline": refused(_NO_DIMENSION),
    "tensor_parallel": refused(_NO_DIMENSION, {"autotp_size": 1}, {"tp_size": 1}),
    "autotp": refused(_NO_DIMENSION),
    "autotp_size": refused(_NO_DIMENSION, 0, 1),
    "sequence_parallel": refused(_NO_DIMENSION),
    "sequence_parallel_size": refused(_NO_DIMENSION, 1),
    "expert_parallel": refused(_NO_DIMENSION),
}
"""Keys of the whole file, and sections that are looked at as one."""

ZERO: Mapping[str, Key] = {
    "stage": adopted("stage", "zero"),
    "contiguous_gradients": passed("flag"),
    "reduce_scatter": passed("flag"),
    "reduce_bucket_size": passed("count"),
    "allgather_partitions": passed("flag"),
    "allgather_bucket_size": passed("even"),
    "use_multi_rank_bucket_allreduce": passed("flag"),
    "overlap_comm": passed("flag"),
    # DeepSpeed would reorder its partitions, but not what tells a checkpoint where they lie.
    "round_robin_gradients": idle("checkpoints need the parameters' own order"),
    "parameter_alignment": passed("flag"),
    "sub_group_size": passed("size"),
    "memory_efficient_linear": passed("flag"),
    "ignore_unused_parameters": passed("flag"),
    "enable_sanity_checks": passed("flag"),
    "stage3_prefetch_bucket_size": passed("size"),
    "stage3_param_persistence_threshold": passed("size"),
    "stage3_model_persistence_threshold": passed("size"),
    "stage3_max_live_parameters": passed("size"),
    "stage3_max_reuse_distance": passed("size"),
    "stage3_module_granularity_threshold": passed("size"),
    "stage3_use_all_reduce_for_fetch_params": passed("flag"),
    "stage3_allgather_sequential": passed("flag"),
    "stage3_gather_16bit_weights_on_model_save": idle("", True),
    "load_from_fp32_weights": idle(_OWN_CHECKPOINTS, True),
    "elastic_checkpoint": idle(_OWN_CHECKPOINTS),
    "ignore_missing_optim_state": idle(_OWN_CHECKPOINTS),
    "pipeline_loading_checkpoint": idle(_OWN_CHECKPOINTS),
    "legacy_stage1": refused(_NOT_HERE),
    "override_module_apply": idle("", True),
    "log_trace_cache_warnings": idle(),
    "save_muon_momentum_buffer_in_memory": idle("there is no Muon"),
    "compute_grad_norm": refused("every step records its norm, set it to true", True),
    "zero_hpz_partition_size": refused("that second copy of the weights is never filled", 0, 1),
    "zero_quantized_weights": refused("losses differ, remove it"),
    "zero_quantized_nontrainable_weights": refused("losses differ, remove it"),
    "zero_quantized_gradients": refused("losses differ, remove it"),
    "zeropp_loco_param": refused("losses differ, remove it"),
    "mics_shard_size": refused("use --strategy fsdp --replicate", -1),
    "mics_hierarchical_params_gather": refused("use --strategy fsdp --replicate"),
    "zenflow": refused("losses differ, remove it"),
    "leaf_module": refused(_NOT_HERE),
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
    "pipeline_read": adopted("flag", "nvme_overlap"),
    "pipeline_write": adopted("flag", "nvme_overlap"),
    "fast_init": idle(),
    "ratio": refused("all of the states are offloaded, or none: set it to 1", 1),
    "super_offload": refused(_NOT_HERE),
    "cpuadam_cores_perc": idle("OMP_NUM_THREADS"),
}
AIO: Mapping[str, Key] = {
    "block_size": adopted("count", "nvme_block"),
    "queue_depth": adopted("count", "nvme_queue_depth"),
    "intra_op_parallelism": adopted("count", "nvme_threads"),
    "single_submit": passed("flag"),
    "overlap_events": passed("flag"),
    "use_gds": refused(_NOT_HERE),
}

BF16: Mapping[str, Key] = {
    "enabled": adopted("flag"),
    "bf16_master_weights_and_grads": adopted("flag"),
    "bf16_optimizer_states": adopted("flag"),
    "check_grad_overflow": refused("steps with NaN are always skipped, set it to true", True),
    "immediate_grad_update": idle(),
    # Real files carry those of fp16 here; in bf16 nothing is scaled.
    **dict.fromkeys(("auto_cast", "loss_scale", "initial_scale_power"), idle("bf16 has none")),
    **dict.fromkeys(("loss_scale_window", "hysteresis", "min_loss_scale"), idle("bf16 has none")),
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
    "buffer_dtype": refused(_NOT_HERE),
    "keep_in_fp32_modules": refused(_NOT_HERE),
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
    "params.torch_adam": idle("", True, False),
    "params.fused": idle("", True, False),
    "params.foreach": idle("", True, False),
    "params.bias_correction": refused("moments are always corrected, set it to true", True),
    "params.amsgrad": refused("set it to false"),
    "params.nesterov": refused("set it to false"),
    "params.dampening": refused("set it to 0"),
    "params.max_grad_norm": refused("write gradient_clipping"),
    "params.fp32_optimizer_states": refused("use --moments-dtype", True),
}
SCHEDULER: Mapping[str, Key] = {
    "type": adopted("text"),
    "params.warmup_min_lr": refused("the rate starts at 0, set it to 0"),
    "params.warmup_min_ratio": refused("the rate starts at 0, set it to 0"),
    "params.warmup_max_lr": adopted("number", "lr"),
    "params.warmup_num_steps": adopted("size", "warmup_steps"),
    "params.warmup_type": adopted("text"),
    "params.total_num_steps": adopted("count"),
    "params.cos_min_ratio": adopted("number"),
    "params.last_batch_iteration": idle("use --resume", -1),
}


def _under(section: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    return {f"{section}.{name}": key for name, key in keys.items()}


KEYS: Mapping[str, Key] = {
    **TOP,
    **_under("zero_optimization", ZERO),
    **_under("zero_optimization.offload_param", OFFLOAD_PARAM),
    **_under("zero_optimization.offload_optimizer", OFFLOAD_OPTIMIZER),
    **_under("aio", AIO),
    **_under("bf16", BF16),
    **_under("fp16", FP16),
    **_under("data_types", DATA_TYPES),
    **_under("optimizer", OPTIMIZER),
    **_under("scheduler", SCHEDULER),
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
