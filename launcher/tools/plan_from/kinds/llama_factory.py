"""LLaMA-Factory's YAML recipes, and the flags of `llamafactory-cli train`."""

from typing import Any, Final

from launcher.tools.plan_from.keys import Facts, Kind, Unknown, no_effect, when, whole, words
from launcher.tools.plan_from.kinds.adapters import adapter_targets
from launcher.tools.plan_from.kinds.shared import ATTENTION
from launcher.tools.plan_from.kinds.transformers import TRAINER_KEYS, bits


def _finetuning(value: Any) -> Facts:
    """Read what is trained: everything, adapters, or another choice planned as one of these."""
    facts = {"lora": str(value) in ("lora", "oft")}
    if str(value) == "oft":
        raise Unknown("is planned as LoRA", **facts)
    if str(value) not in ("full", "lora"):
        raise Unknown("is planned as full: all weights are trained", **facts)
    return facts


_TRAINED: Final = "all weights are planned as trained"
LLAMA_FACTORY = Kind(
    name="LLaMA-Factory YAML",
    engine="llama-factory",
    marks=(
        "stage finetuning_type cutoff_len template lora_target plot_loss overwrite_cache "
        "model_name_or_path dataset_dir quantization_bit"
    ),
    keys={
        **TRAINER_KEYS,
        "cutoff_len": whole("seq_len"),
        "finetuning_type": _finetuning,
        "stage": words(
            {"sft": {}, "pt": {}},
            otherwise="is planned as sft: neither a reference model nor pairs are planned",
        ),
        "lora_target": adapter_targets,
        "lora_rank": whole("lora_rank"),
        "oft_target": adapter_targets,
        "quantization_bit": bits,
        "pure_bf16": when(mixed="bf16", base="bf16", weights="bf16"),
        # the frozen base is loaded in bf16, what is trained stays in fp32 (model/adapter.py)
        "bf16": when(mixed="bf16", base="bf16"),
        "flash_attn": ATTENTION,
        "enable_liger_kernel": when(loss="chunked", norm_bytes=0, liger=True),
        "disable_gradient_checkpointing": when(activation_checkpointing="none"),
        "use_apollo": when(optimizer="apollo"),
        "use_muon": when(optimizer="muon"),
        "fp8": when(mixed="fp8"),
        **dict.fromkeys(("use_galore", "use_badam", "use_adam_mini"), "AdamW is planned"),
        **dict.fromkeys(
            (
                *("freeze_trainable_layers", "freeze_trainable_modules", "use_llama_pro"),
                *("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
            ),
            _TRAINED,
        ),
        "use_unsloth": "Unsloth's kernels are not planned",
        "use_unsloth_gc": "full checkpointing is planned",
        "mixture_of_depths": "every token is planned in every block",
        "ref_model": "a reference model is not planned",
        "use_asft_loss": "its reference model is not planned",
        "reward_model": "a reward model is not planned",
        "additional_target": "whole modules beside adapters are not planned",
        "shift_attn": "whole attention is planned",
        "use_kt": "KTransformers' offload is not planned",
        "use_mca": "Megatron's dimensions are not planned",
        "use_megatron_bridge": "Megatron's dimensions are not planned",
        "use_hyper_parallel": "HyperParallel's sharding is not planned",
        "upcast_lmhead_output": "logits are planned in fp32 anyway",
        "adapter_name_or_path": "adapters are planned by lora_rank",
        **no_effect(
            """
            template dataset media_dir train_on_prompt mask_history buffer_size mix_strategy
            interleave_probs preprocessing_batch_size max_samples ignore_pad_token_for_loss val_size
            packing neat_packing tool_format default_system enable_thinking preserve_thinking
            tokenized_path data_shared_file_system plot_loss compute_accuracy disable_shuffling
            early_stopping_steps adapter_folder split_special_tokens resize_vocab add_*tokens
            new_special_tokens_config init_special_tokens hf_hub_token ms_hub_token om_hub_token
            print_param_status infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype
            loraplus_* pissa_* create_new_adapter pref_* kto_* dpo_* simpo_gamma ppo_* ld_alpha
            galore_* apollo_* badam_* use_swanlab swanlab_* double_quantization quantization_type
            quantization_method quantization_device_map image_* video_* audio_* crop_to_patches
            use_audio_in_video export_* vllm_* sglang_* kt_* ray_* resource_* placement_strategy
            use_reentrant_gc use_dft_loss use_eaft_loss *ft_alpha moe_aux_loss_coef rope_scaling
            upcast_layernorm train_from_scratch predict_with_generate oft_* module_dropout
            temperature top_p top_k max_new_tokens max_length fp8_* profiler_* num_beams do_sample
            repetition_penalty length_penalty skip_special_tokens freeze_extra_modules
            reward_model_* ref_model_*
            """
        ),
    },
    defaults={
        "micro_batch": 8,
        "accumulation": 1,
        "seq_len": 2048,
        "activation_checkpointing": "full",
        "lora": True,
        "lora_rank if lora": 8,
        "lora_targets if lora": "all",
    },
    micro_batch="per_device_train_batch_size",
    accumulation="gradient_accumulation_steps",
    changes=(
        ("does not hold whole logits", {"enable_liger_kernel": True}),
        ("computes in bf16", {"bf16": True}),
        ("keeps the frozen weights in 4 bits", {"quantization_bit": 4}),
        ("keeps moments in 8 bits", {"optim": "adamw_bnb_8bit"}),
        ("keeps weights and moments in bf16", {"pure_bf16": True}),
        ("shards states with FSDP", {"fsdp": "full_shard auto_wrap"}),
        ("trains adapters only", {"finetuning_type": "lora"}),
    ),
)
