"""Accelerate's YAML: `accelerate config` writes it, `accelerate launch --config_file` reads it."""

from launcher.tools.plan_from.keys import Kind, alike, no_effect, under, when, words
from launcher.tools.plan_from.kinds.shared import (
    COMPILED,
    DEEPSPEED_KEYS,
    DEEPSPEED_PLUGIN,
    FSDP_SECTION,
    LAUNCHER_KEYS,
    PARALLELISM_SECTION,
)

ACCELERATE = Kind(
    name="accelerate YAML",
    engine="accelerate",
    marks=(
        "distributed_type compute_environment num_processes main_training_function mixed_precision "
        "fsdp_config.fsdp_auto_wrap_policy"
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
        **PARALLELISM_SECTION,
        **under("deepspeed_config.", {**DEEPSPEED_KEYS, **DEEPSPEED_PLUGIN}),
        "megatron_lm_config": "Megatron's dimensions are not planned",
        "fp8_config": "fp8 is planned as torchao's",
        **no_effect("compute_environment debug command_file commands fp16"),
    },
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
        ("shards parameters, too", {"deepspeed_config.zero_stage": 3}),
        ("moves states to the host", {"fsdp_config.fsdp_offload_params": True}),
        (
            "moves optimizer states to the host",
            {"deepspeed_config.offload_optimizer_device": "cpu"},
        ),
    ),
)
