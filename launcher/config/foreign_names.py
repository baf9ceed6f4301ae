"""Flags of other trainers, and the flag that does the same here.

The names are those of transformers' TrainingArguments, accelerate, TRL, Axolotl, LLaMA-Factory,
nanoGPT, Megatron and torchtitan.
"""

from collections.abc import Mapping
from typing import Final

_NOT_NEEDED: Final = "leave it out"
_STAGES: Final = (
    "--strategy fsdp (FULL_SHARD), with --no-reshard-after-forward (SHARD_GRAD_OP), or with "
    "--replicate N (HYBRID_SHARD)"
)
_START: Final = "torchrun --nproc N -m launcher.train (shardscale plan: --gpus N)"
_ANSWERS: Final[Mapping[str, str]] = {
    "--micro-batch, or --global-batch for that of all ranks": "batch_size bs",
    "--micro-batch": "per_device_train_batch_size per_device_batch_size device_batch_size "
    "local_batch_size train_micro_batch_size_per_gpu micro_batch_size training.local_batch_size",
    "--global-batch": "global_batch_size train_batch_size total_batch_size "
    "training.global_batch_size",
    "--global-batch: accumulation is --global-batch / (--micro-batch x ranks)": "grad_accum "
    "gradient_accumulation_steps gradient_accumulation accumulation_steps grad_accum_steps",
    "--lr": "learning_rate optimizer.lr max_lr peak_lr",
    "--min-lr-ratio": "min_lr min_lr_rate",
    "--epochs": "num_train_epochs num_epochs n_epochs train_epochs epoch",
    "--steps": "max_steps num_steps train_steps max_train_steps train_iters max_iters iterations "
    "training.steps",
    "--activation-checkpointing full": "gradient_checkpointing recompute_activations grad_ckpt "
    "use_gradient_checkpointing activation_checkpoint.mode recompute_granularity checkpointing",
    "--seq-len": "max_seq_length max_seq_len max_length sequence_length seq_length sequence_len "
    "block_size cutoff_len model_max_length training.seq_len",
    "--precision bf16": "bf16 mixed_precision dtype torch_dtype amp bfloat16",
    "--precision fp16": "fp16 half",
    "--precision fp8": "fp8",
    "--out": "output_dir save_path output save_dir job.dump_folder dump_folder",
    "--init-from FOLDER (its weights), or --model NAME (its shape)": "model_name_or_path "
    "model_name base_model pretrained_model_name_or_path model_id",
    "--data": "dataset dataset_name dataset_path train_file data_path datasets training.dataset",
    "--bias none": "disable_bias_linear",
    "--data-field": "dataset_text_field text_column",
    "--tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path model.tokenizer_path",
    "--schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "--warmup-steps": "warmup_iters lr_warmup_steps num_warmup_steps lr_scheduler.warmup_steps",
    "--weight-decay": "wd",
    "--clip": "max_grad_norm grad_clip clip_grad gradient_clipping gradient_clip_val "
    "training.max_norm",
    "--optimizer": "optim optimizer_name optimizer.name",
    "--betas B1 B2": "adam_beta1 adam_beta2 beta1 beta2",
    "--eps": "adam_epsilon adam_eps",
    "--save-every": "save_steps save_interval checkpoint.interval checkpointing_steps",
    "--keep": "save_total_limit checkpoint.keep_latest_k",
    "--eval-every": "eval_steps eval_interval",
    "--log-every": "logging_steps log_interval metrics.log_freq",
    "--resume": "resume_from_checkpoint checkpoint.load_folder load",
    "--lora-rank": "lora_r lora peft use_peft",
    "--lora-targets": "lora_target_modules lora_target target_modules",
    "--quantize-base nf4": "load_in_4bit qlora",
    "--quantize-base int8": "load_in_8bit",
    "--attention flash": "use_flash_attention_2 flash_attn attn_implementation flash_attention "
    "use_flash_attn",
    "--compile": "torch_compile compile.enable compile_model",
    "--no-mask-prompt": "train_on_inputs train_on_prompt",
    "--strategy fsdp": "fsdp use_fsdp",
    _STAGES: "sharding_strategy fsdp_sharding_strategy",
    "--zero": "zero_stage use_deepspeed",
    "--deepspeed": "deepspeed_config deepspeed_config_file ds_config",
    "--offload-optimizer cpu": "offload_optimizer_device cpu_offload fsdp_offload_params",
    "--offload-param cpu": "offload_param_device",
    "--tensor-parallel": "tensor_model_parallel_size tp tp_size parallelism.tensor_parallel_degree",
    "--context-parallel": "context_parallel_size cp cp_size parallelism.context_parallel_degree",
    "--tensor-parallel or --strategy fsdp: there is no pipeline parallelism": "pp "
    "pipeline_model_parallel_size pipeline_parallel parallelism.pipeline_parallel_degree",
    "--strategy fsdp or --zero 3, which shard experts like all parameters: there is no expert "
    "parallelism": "ep expert_parallel expert_parallel_size expert_model_parallel_size "
    "expert_parallel_degree moe_expert_parallel_size ep_size parallelism.expert_parallel_degree",
    _START: "num_processes nproc nproc_per_node num_gpus n_gpus gpus world_size",
    "another trainer, as TRL: preferences are not learned here": "dpo kto orpo simpo dpo_beta "
    "pref_beta pref_loss pref_ftx",
    "--layers": "n_layer n_layers num_layers num_hidden_layers",
    "--heads": "n_head n_heads num_heads num_attention_heads",
    "--kv-heads": "num_key_value_heads num_query_groups n_kv_heads",
    "--d-model": "n_embd hidden_size dim embed_dim",
    "--d-ff": "intermediate_size ffn_hidden_size",
    "--context": "max_position_embeddings n_positions",
    "--report-to wandb and the variable WANDB_PROJECT": "wandb_project wandb",
    "--log-level warning": "silent",
    f"{_NOT_NEEDED}: sequences are always packed": "packing sample_packing",
    f"{_NOT_NEEDED}: every run trains, and reads its test split (--test-batches)": "do_train "
    "do_eval do_predict",
    f"{_NOT_NEEDED}: a run folder is never overwritten": "overwrite_output_dir",
    "torchrun --nproc N -m launcher.train, which tells each rank by its environment; other "
    "launchers, as deepspeed, pass it as this flag": "local_rank",
    f"{_NOT_NEEDED}: no code of a model is ever run": "trust_remote_code",
}
FOREIGN: Final[Mapping[str, str]] = {
    name: answer for answer, names in _ANSWERS.items() for name in names.split()
}
"""Name, with underscores -> what to write here."""


def answer(name: str) -> str | None:
    """Return what replaces a flag or key of another trainer, or None for one that is unknown."""
    own = name.lstrip("-").replace("-", "_").lower()
    found = FOREIGN.get(own) or FOREIGN.get(own.removeprefix("no_"))
    return None if found is None else found if found.startswith(_NOT_NEEDED) else f"use {found}"
