"""transformers' TrainingArguments: as JSON, as YAML, or as flags of a command line."""

from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Keys,
    Kind,
    Unknown,
    alike,
    is_on,
    no_effect,
    number_of,
    switch,
    text,
    when,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.adapters import PEFT_TARGETS, adapter_targets
from launcher.tools.plan_from.kinds.shared import ATTENTION, FSDP_SECTION, LAUNCHER_KEYS, WEIGHTS

_ADAMW: Final[Facts] = {"optimizer": "adamw", "foreach": False}
_EIGHT_BIT: Final[Facts] = {"optimizer": "adamw8bit", "embedding_moments": "fp32"}
OPTIM: Final = words(
    {
        "adamw_torch_fused": _ADAMW,
        **alike(
            "adamw_torch adamw_hf adamw schedule_free_adamw adamw_apex_fused",
            optimizer="adamw",
            foreach=True,
        ),
        **alike("adamw_anyprecision paged_adamw_32bit paged_adamw", **_ADAMW),
        **alike("adamw_bnb_8bit adamw_8bit paged_adamw_8bit ademamix_8bit", **_EIGHT_BIT),
        "adamw_torch_8bit": {"optimizer": "adamw8bit"},
        "adafactor": {"optimizer": "adafactor"},
        "sgd": {"optimizer": "sgd", "momentum": 0.0},
        **alike("lion_32bit lion rmsprop adagrad", optimizer="sgd"),
        "muon": {"optimizer": "muon"},
        **alike("apollo_adamw apollo_adamw_layerwise", optimizer="apollo"),
    },
    otherwise="is planned as AdamW, whose states are as large or larger",
)
"""Lion, RMSprop and Adagrad keep one state of the weights' size, as SGD with momentum does."""


def fsdp_words(value: Any) -> Facts:
    """Read `fsdp`: a switch, or words such as `full_shard auto_wrap offload`."""
    if not is_on(value):
        return {}
    given = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    facts: Facts = {"strategy": "fsdp"}
    for word in given.lower().replace(",", " ").split():
        if word == "shard_grad_op":
            facts["reshard_after_forward"] = False
        elif word in ("hybrid_shard", "hybrid_shard_zero2"):
            facts["replicas"] = "nodes"
        elif word == "no_shard":
            facts["strategy"] = "ddp"
        elif word == "offload":
            facts |= {"offload_optimizer": "cpu", "offload_param": "cpu"}
        elif word not in ("full_shard", "auto_wrap", "true", "1"):
            raise Unknown("is planned as full shard", **facts)
    return facts


def deepspeed_file(value: Any) -> Facts:
    """Read `deepspeed`: the name of a file; its content is read as keys of their own."""
    return {"companion deepspeed": value} if isinstance(value, str) and is_on(value) else {}


def _fsdp_file(value: Any) -> Facts:
    """Read the name of a file with keys of FSDP's section."""
    if str(value).startswith("{"):
        raise Unknown("is planned as FSDP's defaults")
    return {"companion fsdp_config": value} if isinstance(value, str) and is_on(value) else {}


def lora_dropout(value: Any) -> Facts:
    """Read the dropout in front of adapters, which keeps its output and its mask."""
    return {"lora_dropout": min(max(number_of(value) or 0.0, 0.0), 0.99)}


def bits(value: Any) -> Facts:
    """Read the width of a quantized base; 16 and above are none."""
    number = number_of(value) or 16
    return {"quantize_base": "nf4" if number <= 4 else "int8"} if number < 16 else {}


TRAINER_NO_EFFECT: Final = no_effect(
    """
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate warmup_* weight_decay
    adam_* max_grad_norm bf16_full_eval fp16_full_eval average_tokens_across_devices
    gradient_checkpointing_kwargs activation_checkpointing_kwargs liger_kernel_config use_cache
    torch_empty_cache_steps logging_* log_* include_* disable_tqdm report_to run_name project
    trackio_* eval_* evaluation_strategy per_device_eval_batch_size prediction_loss_only
    batch_eval_metrics save_* enable_jit_* push_to_hub* hub_* load_best_model_at_end
    metric_for_best_model greater_is_better ignore_data_skip restore_callback* full_determinism seed
    data_seed accelerator_config dataloader_* remove_unused_columns label_names
    train_sampling_strategy length_column_name group_by_length ddp_find_unused_parameters
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics
    do_train do_eval do_predict do_test resume_from_checkpoint local_rank fp16_opt_level
    fp16_backend half_precision_backend bf16_backend model_revision trust_remote_code use_auth_token
    token cache_dir tokenizer_name config_name use_fast_tokenizer low_cpu_mem_usage train_file
    validation_file dataset_* preprocessing_num_workers overwrite_cache validation_split_percentage
    max_*_samples streaming data_path lora_alpha use_rslora lora_task_type lora_bias lora_path
    bnb_4bit_* use_bnb_nested_quant past_index jit_mode_eval lr_* task_name keep_linebreaks
    text_column* tpu_* mp_parameters use_mps_device
    """
)
TRAINER_KEYS: Final[Keys] = {
    **LAUNCHER_KEYS,
    **FSDP_SECTION,
    **dict.fromkeys(("model_name_or_path", "model_name", "model_id"), text("model")),
    "per_device_train_batch_size": whole("micro_batch"),
    "per_gpu_train_batch_size": whole("micro_batch"),
    "gradient_accumulation_steps": whole("accumulation"),
    "bf16": when(mixed="bf16"),
    "fp16": when(mixed="fp16"),
    "tf32": when(tf32=True),
    "gradient_checkpointing": switch("activation_checkpointing", "full", "none"),
    "activation_checkpointing": when(activation_checkpointing="full"),
    "optim": OPTIM,
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"), when(compile=True)
    ),
    "adafactor": when(optimizer="adafactor"),  # until version 5
    "use_liger_kernel": when(loss="chunked", norm_bytes=0, liger=True),
    "fsdp": fsdp_words,
    "fsdp_config": _fsdp_file,
    "deepspeed": deepspeed_file,
    "use_cpu": when(cpu=True),
    "no_cuda": when(cpu=True),
    "torch_dtype": WEIGHTS,
    "dtype": WEIGHTS,
    "attn_implementation": ATTENTION,
    **dict.fromkeys(
        ("model_max_length", "max_seq_length", "max_length", "max_source_length", "block_size"),
        whole("seq_len"),
    ),
    "load_in_4bit": when(quantize_base="nf4"),
    "load_in_8bit": when(quantize_base="int8"),
    **dict.fromkeys(("use_peft", "use_lora", "lora_enable"), switch("lora")),
    **dict.fromkeys(("lora_r", "lora_rank", "lora_dim"), whole("lora_rank", unset=0)),
    "lora_dropout": lora_dropout,
    "lora_target_modules": adapter_targets,
    "auto_find_batch_size": "the batch given first is planned",
    "optim_args": "states are planned with the optimizer's defaults",
    "optim_target_modules": "every matrix is planned with the optimizer's states",
    "neftune_noise_alpha": "noise on embeddings is not planned",
    "use_dora": "magnitudes of DoRA are not planned",
    "lora_modules_to_save": "whole modules beside adapters are not planned",
    "parallelism_config": "give --tensor-parallel or --context-parallel",
    "eval_accumulation_steps": "evaluation is not planned",
    "label_smoothing_factor": "a second copy of the logits is not planned",
    "ddp_bucket_cap_mb": "DDP's usual buckets are planned",
    "freeze_backbone": "all weights are planned as trained",
    **TRAINER_NO_EFFECT,
}
TRAINER_CHANGES: Final = (
    ("recomputes activations", {"gradient_checkpointing": True}),
    ("does not hold whole logits", {"use_liger_kernel": True}),
    ("computes in bf16", {"bf16": True}),
    ("keeps moments in 8 bits", {"optim": "adamw_bnb_8bit"}),
    ("shards states with FSDP", {"fsdp": "full_shard auto_wrap"}),
)
TRAINING_ARGUMENTS = Kind(
    name="transformers TrainingArguments",
    engine="transformers",
    marks="output_dir per_device_train_batch_size learning_rate",
    keys={
        **TRAINER_KEYS,
        "max_seq_len": whole("seq_len"),
        "deepspeed_config": deepspeed_file,
        "bits": bits,
        **dict.fromkeys(("qlora", "q_lora", "use_qlora"), when(lora=True, quantize_base="nf4")),
        **dict.fromkeys(("lora_modules", "target_modules"), adapter_targets),
        **dict.fromkeys(("use_flash_attn", "use_flash_attention"), when(attention="flash")),
    },
    defaults={"micro_batch": 8, "accumulation": 1, "lora if ranked": True, **PEFT_TARGETS},
    micro_batch="per_device_train_batch_size",
    accumulation="gradient_accumulation_steps",
    changes=TRAINER_CHANGES,
)
