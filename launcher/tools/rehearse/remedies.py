"""Suggestions where a program does not fit, in the words of the library that trains it."""

from collections.abc import Mapping, Sequence

# What takes the memory -> library -> what to set. "torch" is a loop of the user's own.
_REMEDIES: dict[str, dict[str, str]] = {
    "activations": {
        "transformers": "TrainingArguments(gradient_checkpointing=True), or half of "
        "per_device_train_batch_size with twice the gradient_accumulation_steps",
        "trl": "SFTConfig(gradient_checkpointing=True, max_length=...), or half of "
        "per_device_train_batch_size with twice the gradient_accumulation_steps",
        "accelerate": "model.gradient_checkpointing_enable(), or half of the batch with "
        "Accelerator(gradient_accumulation_steps=2)",
        "deepspeed": "checkpointing.configure(...), or half of train_micro_batch_size_per_gpu with "
        "twice the gradient_accumulation_steps",
        "lightning": "torch.utils.checkpoint in each block, or half of the batch with "
        "fabric.no_backward_sync for every other one",
        "torch": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), or half of the "
        "batch with an optimizer step after every second backward",
    },
    "temporary": {
        "transformers": "TrainingArguments(use_liger_kernel=True), which never makes all logits, "
        "or half of per_device_train_batch_size with twice the gradient_accumulation_steps",
        "trl": "SFTConfig(use_liger_kernel=True), which never makes all logits, or half of "
        "per_device_train_batch_size with twice the gradient_accumulation_steps",
        "deepspeed": "half of train_micro_batch_size_per_gpu, and smaller reduce_bucket_size and "
        "allgather_bucket_size",
        "torch": "half of the batch, or a loss that makes the logits in chunks",
    },
    "temporary in step": {
        "transformers": 'TrainingArguments(optim="adamw_torch_fused"), without temporaries of all '
        "parameters at once",
        "trl": 'SFTConfig(optim="adamw_torch_fused"), without temporaries of all weights at once',
        "deepspeed": "smaller reduce_bucket_size and allgather_bucket_size",
        "torch": "AdamW(fused=True), without temporaries of all parameters at once",
    },
    "optimizer": {
        "transformers": 'TrainingArguments(optim="adamw_bnb_8bit"), or fsdp="full_shard" on '
        "several GPUs",
        "trl": 'SFTConfig(optim="adamw_bnb_8bit"), or a LoraConfig as peft_config',
        "accelerate": "FullyShardedDataParallelPlugin(fsdp_version=2) on several GPUs, or "
        "bitsandbytes.optim.AdamW8bit",
        "deepspeed": '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}',
        "lightning": "FSDPStrategy() on several GPUs, or bitsandbytes.optim.AdamW8bit",
        "torch": "fully_shard(model) on several GPUs, or bitsandbytes.optim.AdamW8bit",
    },
    "params": {
        "transformers": 'from_pretrained(..., dtype="bfloat16"), PEFT\'s LoraConfig, or '
        'TrainingArguments(fsdp="full_shard") on several GPUs',
        "trl": 'SFTConfig(model_init_kwargs={"dtype": "bfloat16"}), or a LoraConfig as peft_config',
        "deepspeed": '"zero_optimization": {"stage": 3}',
        "torch": "weights in bfloat16, or fully_shard(model) on several GPUs",
    },
}
SMALLEST_SHARE = 0.05
"""Share of the peak; less of it is not worth a change."""
_SAME = {"grads": "optimizer", "master": "optimizer", "frozen": "params", "buffers": "temporary"}


def remedies(by_category: Mapping[str, int], phase: str, libraries: Sequence[str]) -> list[str]:
    """Return at most three settings, for what takes most in a phase first; each once."""
    # the outermost comes first: trl wraps transformers' Trainer, and takes its own words
    library = libraries[0] if libraries else "torch"
    found: list[str] = []
    worth = SMALLEST_SHARE * sum(by_category.values())
    for category, size in sorted(by_category.items(), key=lambda item: -item[1]):
        if category == "other" or size < worth:
            continue
        name = _SAME.get(category, category)
        if name == "temporary" and phase.endswith("/step"):
            name = "temporary in step"
        words = _REMEDIES[name]
        remedy = f"{category}: {words.get(library, words['torch'])}"
        if remedy.partition(": ")[2] not in [one.partition(": ")[2] for one in found]:
            found.append(remedy)
    return found[:3]
