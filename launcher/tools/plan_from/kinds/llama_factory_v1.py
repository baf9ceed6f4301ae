"""YAML files of LLaMA-Factory's version 1 (`USE_V1=1 llamafactory-cli`), a trainer of its own."""

from typing import Any

from launcher.tools.plan_from.keys import Facts, Kind, no_effect, switch, text, when, whole, words
from launcher.tools.plan_from.kinds.adapters import adapter_targets
from launcher.tools.plan_from.kinds.shared import ATTENTION, LAUNCHER_KEYS
from launcher.tools.plan_from.kinds.transformers import (
    TRAINER_NO_EFFECT,
    bits,
    deepspeed_file,
    lora_dropout,
)


def _kernels(value: Any) -> Facts:
    # without its loss: the trainer asks for whole logits (kernels/liger_kernel_ops.py)
    return {"norm_bytes": 0, "liger": True} if "liger" in str(value) else {}


LLAMA_FACTORY_V1 = Kind(
    name="LLaMA-Factory v1 YAML",
    engine="llama-factory-v1",
    marks=(
        "model_class train_dataset sample_backend cutoff_len micro_batch_size dist_config.name "
        "kernel_config.name peft_config.name quant_config.name optim_config.name init_config.name "
        "batching_strategy"
    ),
    keys={
        **LAUNCHER_KEYS,
        **TRAINER_NO_EFFECT,
        "model": text("model"),
        "model_class": words({"llm": {}}, otherwise="the loss of the next token is planned"),
        "flash_attn": ATTENTION,
        "micro_batch_size": whole("micro_batch"),
        "global_batch_size": whole("global_batch"),
        "cutoff_len": whole("seq_len"),
        "bf16": switch("mixed", "bf16", None),
        "enable_activation_checkpointing": switch("activation_checkpointing", "full", "none"),
        "cp_size": whole("context_parallel"),
        "mp_replicate_size": whole("replicas"),
        "dist_config.name": words(
            {
                "fsdp2": {"strategy": "fsdp", "alone": "single"},
                "deepspeed": {"engine": "deepspeed"},
            },
            otherwise="is planned as fsdp2, every rank with all experts",
            strategy="fsdp",
        ),
        "dist_config.config_file": deepspeed_file,
        "dist_config.reshard_after_forward": switch("reshard_after_forward"),
        "dist_config.offload_params": when(offload_optimizer="cpu", offload_param="cpu"),
        "optim_config.name": words({"muon": {"optimizer": "muon"}}),
        "kernel_config.name": _kernels,
        "peft_config.name": words(
            {"lora": {"lora": True}}, otherwise="all weights are planned as trained"
        ),
        "peft_config.r": whole("lora_rank"),
        "peft_config.lora_dropout": lora_dropout,
        "peft_config.target_modules": adapter_targets,
        "quant_config.name": lambda value: {"quantize_base": "nf4"} if value == "bnb" else {},
        "quant_config.quantization_bit": bits,
        "peft_config.use_dora": "magnitudes of DoRA are not planned",
        "peft_config.modules_to_save": "whole modules beside adapters are not planned",
        "dist_config.ep_size": "experts are planned on every rank",
        **no_effect(
            """
            train_dataset batching_* dist_timeout dp_size mp_shard_size cp_mode pref_*
            sample_backend max_new_tokens custom_chat_template init_config optim_config
            kernel_config peft_config quant_config dist_config.dcp_path dist_config.pin_memory
            dist_config.ep_dispatcher
            """
        ),
    },
    defaults={
        "micro_batch": 1,
        "seq_len": 2048,
        "mixed": "bf16",
        "base": "bf16",
        "activation_checkpointing": "full",
        "lora_rank if lora": 8,
        "lora_targets if lora": "all",
        "lora_dropout if lora": 0.05,
    },
    micro_batch="micro_batch_size",
    changes=(
        ("recomputes activations", {"enable_activation_checkpointing": True}),
        ("computes in bf16", {"bf16": True}),
    ),
)
