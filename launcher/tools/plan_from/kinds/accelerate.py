"""Accelerate's YAML: `accelerate config` writes it, `accelerate launch --config_file` reads it."""

from launcher.tools.plan_from.keys import Kind, alike, text, when, whole, words
from launcher.tools.plan_from.kinds.shared import (
    COMPILED,
    DEEPSPEED_KEYS,
    DEEPSPEED_LEFT_OUT,
    DEEPSPEED_NO_EFFECT,
    FSDP_LEFT_OUT,
    FSDP_NO_EFFECT,
    FSDP_SECTION,
    LAUNCHER_KEYS,
    LAUNCHER_NO_EFFECT,
    device,
    ring,
    stage,
)

_D = "deepspeed_config"
_D_NO_EFFECT = " ".join(f"{_D}.{name}" for name in DEEPSPEED_NO_EFFECT.split())
_P = "parallelism_config.parallelism_config"
ACCELERATE = Kind(
    name="accelerate YAML",
    engine="accelerate",
    marks=(
        "distributed_type",
        "compute_environment",
        "num_processes",
        "main_training_function",
        "mixed_precision",
        "fsdp_config.fsdp_auto_wrap_policy",
    ),
    keys={
        **LAUNCHER_KEYS,
        "distributed_type": words(
            {
                "NO": {"strategy": "single"},
                **alike("MULTI_GPU MULTI_NPU MULTI_XPU MULTI_MLU", strategy="ddp"),
                "FSDP": {"strategy": "fsdp", "engine": "fsdp"},
                "DEEPSPEED": {"engine": "deepspeed"},
            },
        ),
        "use_cpu": when(cpu=True),
        "dynamo_config.dynamo_backend": COMPILED,
        **FSDP_SECTION,
        **{f"{_D}.{name}": reader for name, reader in DEEPSPEED_KEYS.items()},
        f"{_D}.zero_stage": stage,
        f"{_D}.offload_optimizer_device": device("offload_optimizer"),
        f"{_D}.offload_param_device": device("offload_param"),
        f"{_D}.offload_optimizer_nvme_path": text("nvme_path"),
        f"{_D}.offload_param_nvme_path": text("nvme_path"),
        f"{_D}.deepspeed_config_file": text("companion deepspeed"),
        f"{_P}_dp_replicate_size": whole("replicas"),
        f"{_P}_tp_size": whole("tensor_parallel"),
        f"{_P}_cp_size": ring,
        f"{_P}_sp_size": whole("context_parallel"),
    },
    left_out={
        "megatron_lm_config": "Megatron's dimensions are not planned",
        "fp8_config": "fp8 is planned as torchao's",
        f"{_D}.deepspeed_moe_layer_cls_names": "experts are planned by the model",
        **FSDP_LEFT_OUT,
        **{f"{_D}.{name}": reason for name, reason in DEEPSPEED_LEFT_OUT.items()},
    },
    no_effect=(
        "compute_environment debug command_file commands deepspeed_config.zero3_init_flag "
        "deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_multinode_launcher "
        "deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_*clusion_filter "
        f"{_P}_dp_shard_size {_P}_cp_* {_P}_sp_* fp16 "
        f"{FSDP_NO_EFFECT} {_D_NO_EFFECT} {LAUNCHER_NO_EFFECT}"
    ),
    accumulation="gradient_accumulation_steps",
    changes=(
        ("computes in bf16", {"mixed_precision": "bf16"}),
        ("recomputes activations", {"fsdp_config.fsdp_activation_checkpointing": True}),
        ("frees gathered parameters", {"fsdp_config.fsdp_reshard_after_forward": True}),
        (
            "shards states with FSDP",
            {
                "distributed_type": "FSDP",
                "fsdp_config.fsdp_version": 2,
                "fsdp_config.fsdp_reshard_after_forward": True,
                "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        ),
        ("shards parameters, too", {f"{_D}.zero_stage": 3}),
        ("moves states to the host", {"fsdp_config.fsdp_offload_params": True}),
        ("moves optimizer states to the host", {f"{_D}.offload_optimizer_device": "cpu"}),
    ),
)
