"""Axolotl's YAML recipes."""

from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Kind,
    Unknown,
    alike,
    is_on,
    no_effect,
    text,
    when,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.adapters import PEFT_TARGETS, adapter_targets
from launcher.tools.plan_from.kinds.shared import ATTENTION, FSDP_SECTION, LAUNCHER_KEYS, WEIGHTS
from launcher.tools.plan_from.kinds.transformers import (
    OPTIM,
    TRAINER_NO_EFFECT,
    deepspeed_file,
    fsdp_words,
    lora_dropout,
)

_BF16: Final[Facts] = {"mixed": "bf16", "weights": "bf16"}


def _bf16(value: Any) -> Facts:
    on = value == "auto" or is_on(value)
    return dict(_BF16) if on else {"mixed": None, "weights": None}


def _checkpointing(value: Any) -> Facts:
    if str(value) in ("offload", "offload_disk", "unsloth"):
        return {"activation_checkpointing": "offload"}
    return {"activation_checkpointing": "full" if is_on(value) else "none"}


def _plugins(value: Any) -> Facts:
    names = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return {"loss": "chunked"} if "CutCrossEntropy" in names else {}


_OTHER = "another objective than the next token's: its reference model is not planned"


def _context(value: Any) -> Facts:
    if str(value) == "auto":
        raise Unknown("is chosen when it runs: give --context-parallel N")
    return whole("context_parallel")(value)


AXOLOTL = Kind(
    name="Axolotl YAML",
    engine="axolotl",
    marks=(
        "base_model micro_batch_size sequence_len adapter num_epochs datasets sample_packing "
        "load_in_4bit lora_target_linear val_set_size"
    ),
    keys={
        **LAUNCHER_KEYS,
        **FSDP_SECTION,
        **TRAINER_NO_EFFECT,  # which it gives to transformers' Trainer
        "base_model": text("model"),
        "sequence_len": whole("seq_len"),
        "micro_batch_size": whole("micro_batch"),
        "gradient_accumulation_steps": whole("accumulation"),
        "bf16": _bf16,
        "bfloat16": when(**_BF16),
        **dict.fromkeys(("fp16", "float16"), when(mixed="fp16", weights="fp16")),
        "fp8": when(mixed="fp8"),
        "tf32": when(tf32=True),
        "gradient_checkpointing": _checkpointing,
        "activation_offloading": when(activation_checkpointing="offload"),
        "optimizer": OPTIM,
        "attn_implementation": ATTENTION,
        "flash_attention": when(attention="flash"),
        "sdp_attention": when(attention="sdpa"),
        "eager_attention": when(attention="eager"),
        "flex_attention": when(attention="flex"),
        "xformers_attention": when(attention="flash"),
        "adapter": words(alike("lora qlora", lora=True), otherwise="is planned as LoRA", lora=True),
        "lora_r": whole("lora_rank"),
        "lora_dropout": lora_dropout,
        "lora_target_modules": adapter_targets,
        "lora_target_linear": when(**{"every layer": True}),
        "load_in_4bit": when(quantize_base="nf4"),
        "load_in_8bit": when(quantize_base="int8"),
        "liger_fused_linear_cross_entropy": when(loss="chunked"),
        "liger_rms_norm": when(norm_bytes=0, liger=True),
        "cut_cross_entropy": when(loss="chunked"),
        "chunked_cross_entropy": when(loss="chunked"),
        "plugins": _plugins,
        "torch_dtype": WEIGHTS,
        "torch_compile": when(compile=True),
        "deepspeed": deepspeed_file,
        "fsdp": fsdp_words,
        "dp_replicate_size": whole("replicas"),
        # with what is left as replicas: utils/distributed.py
        "dp_shard_size": whole("shard ranks"),
        "tensor_parallel_size": whole("tensor_parallel"),
        "context_parallel_size": _context,
        "sequence_parallel_degree": _context,
        "world_size": whole("gpus"),
        **dict.fromkeys(
            ("rl", "reward_model", "process_reward_model", "ebft", "diffusion"), _OTHER
        ),
        "unfrozen_parameters": "all weights are planned as trained",
        "freeze_mm_modules": "all weights are planned as trained",
        "lora_modules_to_save": "whole modules beside adapters are not planned",
        "lora_target_parameters": "adapters of experts' parameters are not planned",
        "peft_use_dora": "magnitudes of DoRA are not planned",
        "peft_layers_to_transform": "every layer is planned with adapters",
        "relora": "restarts of adapters are not planned",
        "lisa_n_layers": "all weights are planned as trained",
        "qat": "fake quantization is not planned",
        "gptq": "GPTQ is planned as its bits say",
        "quantize_moe_experts": "experts are planned as the base is",
        "tiled_mlp": "give --mlp-tile TOKENS",
        "selective_checkpointing": "full checkpointing is planned",
        "layer_offloading": "layers are planned on the device",
        "auto_find_batch_size": "the batch given is planned",
        "optim_target_modules": "every matrix is planned with the optimizer's states",
        "model_quantization_config": "weights are planned as not quantized",
        "expert_parallel_size": "experts are planned on every rank",
        "embeddings_skip_upcast": "embeddings are planned as the other weights",
        "neftune_noise_alpha": "noise on embeddings is not planned",
        "deepcompile": "DeepSpeed's compiler is not planned",
        **no_effect(
            """
            datasets test_datasets num_epochs sample_packing* multipack_* saves_per_epoch
            val_set_size wandb_* evals_per_epoch special_tokens* lora_model_dir chat_template*
            model_type tokenizer_* gradient_checkpointing_kwargs* strict pad_to_sequence_len
            pad_to_multiple_of liger_* eot_tokens skip_prepare_dataset processor_* lora_mlp_kernel
            lora_qkv_kernel lora_o_kernel lora_embedding_kernel loss_watchdog_* use_kernels
            torchdistx_path gptq_* ddp ddp_* push_dataset_to_hub max_packed_sequence_len
            train_on_inputs trl experimental_* experts_implementation lora_fan_in_fan_out
            early_stopping_patience resize_token_embeddings_to_32x pretraining_dataset*
            fused_attn_kernel flex_attn_* shuffle_* cosine_* eta_min use_swanlab swanlab_*
            flash_attn_* bnb_config_kwargs* use_tensorboard streaming* reinit_weights
            hf_use_auth_token device_map device accelerator_config* use_wandb use_ray ray_*
            use_otel_metrics otel_* torch_compile_* use_mlflow mlflow_* use_comet comet_* gradio_*
            peft* eaft_* use_eaft curriculum_sampling default_system_message min_sample_len
            excess_length_strategy is_*_derived_model base_model_config base_model_ignore_patterns
            cls_model_config revision_of_model tokens* added_tokens_overrides auto_resume_* gc_steps
            generate_samples num_generation_samples generation_* heads_k_stride ring_attn_func
            bench_dataset do_bench_eval do_causal_lm_eval total_num_tokens use_scattermoe
            use_sonicmoe llama4_linearized_experts vllm.* gemma4_* use_*_kernels jagged_* lisa_*
            fp8_* secrets overrides_of_model_config* model_config.* float32 batch_flattening
            fix_untrained_tokens dynamic_checkpoint* embedding_lr* loraplus_* profiler_*
            scaling_softmax* use_trackio lora_on_cpu merge_lora tiled_mlp_*
            chunked_cross_entropy_num_chunks relora_* gpu_memory_limit max_memory role_boundaries
            mean_resizing_embeddings dpo_* kto_* orpo_* cpo_* simpo_* batch_size full_finetune
            """
        ),
    },
    defaults={
        "micro_batch": 1,
        "accumulation": 1,
        "seq_len": 512,
        "lora_rank if lora": 8,
        **_BF16,
        **PEFT_TARGETS,
    },
    micro_batch="micro_batch_size",
    accumulation="gradient_accumulation_steps",
    changes=(
        ("recomputes activations", {"gradient_checkpointing": True}),
        (
            "does not hold whole logits",
            {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
        ),
        ("keeps moments in 8 bits", {"optimizer": "adamw_bnb_8bit"}),
        ("keeps the frozen weights in 4 bits", {"load_in_4bit": True, "adapter": "qlora"}),
        ("moves kept activations to the host", {"activation_offloading": True}),
        (
            "shards states with FSDP",
            {
                "fsdp_version": 2,
                "fsdp_config.reshard_after_forward": True,
                "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        ),
    ),
)
