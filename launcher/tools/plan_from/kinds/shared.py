"""Keys that several trainers share: Accelerate's FSDP section, DeepSpeed's JSON, launchers."""

import re
from collections.abc import Mapping
from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Keys,
    Reader,
    Unknown,
    alike,
    is_on,
    no_effect,
    number_of,
    text,
    under,
    verbatim,
    when,
    whole,
    words,
)

_FULL: Final[Facts] = {"strategy": "fsdp", "reshard_after_forward": True}
_GRAD_OP: Final[Facts] = {"strategy": "fsdp", "reshard_after_forward": False}
# torch's ShardingStrategy, by name or number: Accelerate takes both
SHARDING_WORDS: Final[Mapping[str, Facts]] = {
    **alike("FULL_SHARD 1", **_FULL),
    **alike("SHARD_GRAD_OP 2", **_GRAD_OP),
    **alike("NO_SHARD 3", strategy="ddp"),
    **alike("HYBRID_SHARD 4", **_FULL, replicas="nodes"),
    **alike("HYBRID_SHARD_ZERO2 _HYBRID_SHARD_ZERO2 5", **_GRAD_OP, replicas="nodes"),
}


def reshards(value: Any) -> Facts:
    """Read `reshard_after_forward`: a switch in FSDP2, a strategy's name in some FSDP1 files."""
    if str(value).upper() in SHARDING_WORDS and not str(value).isdigit():
        return dict(SHARDING_WORDS[str(value).upper()])
    return _FULL if is_on(value) else _GRAD_OP


_FSDP: Final[Keys] = {
    "version": lambda value: {"strategy": "fsdp", "fsdp_version": int(number_of(value) or 2)},
    "sharding_strategy": words(SHARDING_WORDS, otherwise="is planned as full shard"),
    "reshard_after_forward": reshards,
    "offload_params": when(offload_optimizer="cpu", offload_param="cpu"),
    "cpu_offload": when(offload_optimizer="cpu", offload_param="cpu"),
    "activation_checkpointing": when(activation_checkpointing="full"),
    "activation_checkpointing_offload": when(activation_checkpointing="offload"),
    "mixed_precision_policy": "the usual policy is planned: bf16 to compute, fp32 shards",
    "min_num_params": "each block is planned as a group",
    **no_effect(
        """
        auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch backward_prefetch_policy
        forward_prefetch use_orig_params sync_module_states cpu_ram_efficient_loading
        state_dict_type final_state_dict_type limit_all_gathers cpu_offload_pin_memory xla
        xla_fsdp_v2 xla_fsdp_grad_ckpt
        """
    ),
}
FSDP_SECTION: Final[Keys] = {
    **under("fsdp_config. fsdp_config.fsdp_", _FSDP),  # Accelerate takes both
    "fsdp_config.fsdp": when(strategy="fsdp"),
}


def device(fact: str) -> Reader:
    """Read where something is offloaded to."""
    return words({"none": {}, **verbatim("cpu nvme", fact)})


def stage(value: Any) -> Facts:
    """Read a ZeRO stage."""
    number = number_of(value)
    if number not in (0, 1, 2, 3):
        raise Unknown("is no stage from 0 to 3")
    return {"strategy": "ddp"} if number == 0 else {"strategy": "zero", "zero": int(number)}


def _bucket(name: str) -> Reader:
    def read(value: Any) -> Facts:
        if str(value) == "auto":
            return {f"bucket {name}": "auto"}
        return {f"bucket {name}": int(number_of(value) or 0)} if number_of(value) else {}

    return read


def _precision(name: str) -> Reader:
    return lambda value: {"mixed": name} if str(value) != "auto" and is_on(value) else {}


_BUCKETS: Final = (
    "reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size "
    "stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance"
)
_ZERO: Final[Keys] = {
    "stage": stage,
    "offload_optimizer.device": device("offload_optimizer"),
    "offload_param.device": device("offload_param"),
    "offload_optimizer.nvme_path": text("nvme_path"),
    "offload_param.nvme_path": text("nvme_path"),
    "cpu_offload": when(offload_optimizer="cpu"),
    "overlap_comm": lambda value: {} if value is None else {"overlap_comm": is_on(value)},
    **{name: _bucket(name) for name in _BUCKETS.split()},
    **{name.removeprefix("stage3_"): _bucket(name) for name in _BUCKETS.split()},
    "offload_optimizer.ratio": "the whole optimizer is planned as offloaded",
    **dict.fromkeys(
        (
            *("zero_hpz_partition_size", "mics_shard_size", "zenflow"),
            *("zero_quantized_weights", "zero_quantized_gradients"),
        ),
        "is no part of the planned ZeRO",
    ),
    **no_effect(
        """
        contiguous_gradients reduce_scatter allgather_partitions sub_group_size
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        round_robin_gradients ignore_unused_parameters load_from_fp32_weights elastic_checkpoint
        offload_optimizer.pin_memory offload_param.pin_memory offload_*.buffer_* offload_*.fast_init
        offload_*.pipeline* offload_*.max_in_cpu memory_efficient_linear cpu_offload_use_pin_memory
        legacy_stage1 log_trace_cache_warnings use_all_reduce_for_fetch_params
        gather_16bit_weights_on_model_save module_granularity_*
        """
    ),
}
DEEPSPEED_KEYS: Final[Keys] = {
    **under("zero_optimization.", _ZERO),
    "train_micro_batch_size_per_gpu": whole("micro_batch"),
    "gradient_accumulation_steps": whole("accumulation"),
    "train_batch_size": whole("global_batch"),
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "data_types.grad_accum_dtype": words(verbatim("fp32 bf16", "grad_accum_dtype")),
    "optimizer.type": words(
        {
            **alike("adam adamw fusedadam cpuadam", optimizer="adamw"),
            "sgd": {"optimizer": "sgd", "momentum": 0.0},
        },
        otherwise="is planned as AdamW",
    ),
    "tensor_parallel.autotp_size": whole("tensor_parallel", unset=0),
    "sequence_parallel_size": whole("context_parallel"),
    "activation_checkpointing": "Megatron's own calls it; give --activation-checkpointing full",
    "pipeline": "pipelines are not planned",
    "compression_training": "compression is not planned",
    "curriculum_learning": "the longest sequences are planned",
    "data_efficiency": "the longest sequences are planned",
    "torch_autocast": "give --precision",
    "bf16.bf16_master_weights_and_grads": "master weights are planned in fp32",
    "fp16.fp16_master_weights_and_grads": "master weights are planned in fp32",
    "bf16.bf16_optimizer_states": "optimizer states are planned in fp32",
    "amp.enabled": "apex is not planned",
    "elasticity.enabled": "the batch given is planned",
    "autotuning.enabled": "the batch given is planned",
    **no_effect(
        """
        gradient_clipping steps_per_print wall_clock_breakdown memory_breakdown scheduler
        optimizer.params.* optimizer.legacy_fusion zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer fp16.* bf16.* bfloat16.* aio flops_profiler comms_logger
        comms_config tensorboard wandb csv_monitor monitor_config dump_state prescale_gradients
        gradient_predivide_factor sparse_gradients communication_data_type checkpoint elasticity
        autotuning compile.backend dataloader_drop_last log_level amp seed
        """
    ),
}


def _torchrun(fact: str) -> Reader:
    """Read a number of torchrun's: also `gpu`, which only the machine knows, or `MIN:MAX` nodes."""

    def read(value: Any) -> Facts:
        most = str(value).rpartition(":")[2]
        if most in ("auto", "cpu", "gpu"):
            raise Unknown("is known only to the machine: give --gpus N")
        return whole(fact)(most)

    return read


COMPILED: Final = words(
    {"no": {}, "inductor": {"compile": True}}, otherwise="is planned as not compiled"
)


def _included(value: Any) -> Facts:
    """Read DeepSpeed's `localhost:0,1`."""
    devices = re.fullmatch(r"[\w.-]+:(\d+(?:,\d+)*)", str(value))
    if devices is None:
        raise Unknown("give --gpus N")
    return {"per_machine": len(devices[1].split(","))}


def ring(value: Any) -> Facts:
    """Read ranks of torch's context parallelism, a ring."""
    facts = whole("context_parallel")(value)
    several = facts.get("context_parallel", 1) > 1
    return facts | {"context_parallel_method": "ring"} if several else facts


_PARALLELISM: Final[Keys] = {
    "dp_replicate_size": whole("replicas"),
    "tp_size": whole("tensor_parallel"),
    "cp_size": ring,
    "sp_size": whole("context_parallel"),
    **no_effect("?p_*"),
}
PARALLELISM_SECTION: Final = under("parallelism_config.parallelism_config_", _PARALLELISM)
DEEPSPEED_PLUGIN: Final[Keys] = {  # of Accelerate, beside DeepSpeed's own keys
    "zero_stage": stage,
    "offload_optimizer_device": device("offload_optimizer"),
    "offload_param_device": device("offload_param"),
    "offload_optimizer_nvme_path": text("nvme_path"),
    "offload_param_nvme_path": text("nvme_path"),
    "deepspeed_config_file": text("companion deepspeed"),
    "deepspeed_moe_layer_cls_names": "experts are planned by the model",
    **no_effect(
        """
        zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_multinode_launcher
        deepspeed_*clusion_filter gradient_clipping
        """
    ),
}
LAUNCHER_KEYS: Final[Keys] = {
    "include": _included,
    "nproc_per_node": _torchrun("per_machine"),
    "nproc": _torchrun("per_machine"),
    "nnodes": _torchrun("machines"),
    "num_processes": whole("gpus"),
    "num_machines": whole("machines"),
    "num_gpus": whole("per_machine"),  # of each node: deepspeed/launcher/runner.py
    "num_nodes": whole("machines"),
    "mixed_precision": words({"no": {}, **verbatim("bf16 fp16 fp8", "mixed")}),
    "use_fsdp": when(strategy="fsdp", engine="fsdp"),
    "use_deepspeed": when(engine="deepspeed"),
    **under("fsdp_", _FSDP),
    **DEEPSPEED_PLUGIN,
    "deepspeed_stage": stage,
    "config_file": text("companion config_file"),
    "multi_gpu": when(),
    "cpu": when(cpu=True),
    "dynamo_backend": COMPILED,
    **under("parallelism_config_", _PARALLELISM),
    **no_effect(
        """
        rdzv_* master_addr master_port standalone node_rank main_process_ip main_process_port
        machine_rank max_restarts monitor_interval module dynamo_* use_parallelism_config
        local_ranks_filter tee log_dir role hostfile exclude gpu_ids downcast_bf16
        num_cpu_threads_per_process quiet main_training_function same_network enable_cpu_affinity
        mpirun_* tpu_* no_python
        """
    ),
}
ATTENTION: Final = words(
    {
        **alike("sdpa math", attention="sdpa"),
        "eager": {"attention": "eager"},
        **alike("flash_attention_2 flash_attention_3 fa2 fa3 flash flash-attn2", attention="flash"),
        **alike("flex_attention flex", attention="flex"),
    },
    otherwise="is planned as sdpa, which keeps as few bytes",
)
WEIGHTS: Final = words(
    {
        **alike("bfloat16 bf16", weights="bf16"),
        **alike("float16 fp16", weights="fp16"),
        **alike("float32 fp32", weights="fp32"),
    }
)
