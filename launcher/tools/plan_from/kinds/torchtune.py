"""torchtune's YAML recipes, as `tune run RECIPE --config FILE` reads them."""

from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Kind,
    Reader,
    Unknown,
    alike,
    no_effect,
    switch,
    when,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.shared import LAUNCHER_KEYS, reshards, ring
from launcher.tools.plan_from.kinds.transformers import lora_dropout

# module of a model's builder -> our name without the size, which is the rest of the builder's
_FAMILIES: Final = {
    "code_llama2": "codellama-",
    "gemma": "gemma-",
    "gemma2": "gemma-2-",
    "llama2": "llama-2-",
    "llama3": "llama-3-",
    "llama3_1": "llama-3.1-",
    "llama3_2": "llama-3.2-",
    "llama3_3": "llama-3.1-",  # of the same shape
    "mistral": "mistral-",
    "phi3": "phi-3-",
    "phi4": "phi-",
    "qwen2": "qwen2-",
    "qwen2_5": "qwen2.5-",
    "qwen3": "qwen3-",
}
_SIZES: Final = {"phi-3-mini": "phi-3-mini-4k", "phi-14b": "phi-4"}
_LAYERS: Final = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "proj"}


def _model(value: Any) -> Facts:
    """Read a builder, `torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct`."""
    *_, family, builder = ("", *str(value).split("."))
    how, _, size = builder.rpartition(f"{family}_")
    facts: Facts = {"quantize_base": "nf4"} if how == "qlora_" else {}
    if family not in _FAMILIES or how not in ("", "lora_", "qlora_"):
        return facts | {"model": str(value)}
    for end in ("_instruct", "_base"):
        size = size.removesuffix(end)
    name = _FAMILIES[family] + size.replace("_", ".")
    return facts | {"model": _SIZES.get(name, name)}


def _adapted(value: Any) -> Facts:
    """Read the layers of attention with adapters."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    if others := [name for name in names if name not in _LAYERS]:
        raise Unknown(f"adapters of {', '.join(others)} are not planned", lora=True)
    return {f"target {_LAYERS[name]}": True for name in names}


_OPTIMIZERS: Final[Reader] = words(
    {
        **alike("AdamW Adam PagedAdamW", optimizer="adamw"),
        **alike("AdamW8bit PagedAdamW8bit", optimizer="adamw8bit"),
        "SGD": {"optimizer": "sgd", "momentum": 0.0},
    },
    otherwise="is planned as AdamW",
)
TORCHTUNE: Final = Kind(
    name="torchtune YAML",
    engine="torchtune",
    marks=(
        "model._component_ tokenizer._component_ checkpointer._component_ optimizer._component_ "
        "loss._component_ dataset._component_"
    ),
    keys={
        "model._component_": _model,
        "model.lora_attn_modules": _adapted,
        "model.apply_lora_to_mlp": switch("target mlp"),
        "model.lora_rank": whole("lora_rank"),
        "model.lora_dropout": lora_dropout,
        "model.quantize_base": when(quantize_base="nf4"),
        "tokenizer.max_seq_len": whole("seq_len"),
        "batch_size": whole("micro_batch"),
        "gradient_accumulation_steps": whole("accumulation"),
        "optimizer._component_": _OPTIMIZERS,
        "optimizer_in_bwd": when(optimizer_in_backward=True, clip=0.0),
        "loss._component_": words(
            {
                # the second one's but for logits in bf16
                **alike("LinearCrossEntropyLoss CEWithChunkedOutputLoss", loss="chunked"),
                "CrossEntropyLoss": {"loss": "whole"},
            },
            otherwise="is planned as a loss that holds whole logits",
            loss="whole",
        ),
        "compile": when(compile=True),
        # weights, gradients and states are all of it
        "dtype": words(
            {
                "bf16": {"mixed": "bf16", "weights": "bf16"},
                "fp32": {"mixed": None, "weights": "fp32"},
            }
        ),
        "enable_activation_checkpointing": when(activation_checkpointing="full"),
        "enable_activation_offloading": when(activation_checkpointing="offload"),
        "fsdp_cpu_offload": when(offload_optimizer="cpu", offload_param="cpu"),
        "fsdp_reshard_after_forward": reshards,
        "data_parallel_replicate_dim": whole("replicas"),
        "tensor_parallel_dim": whole("tensor_parallel"),
        "context_parallel_dim": ring,
        **LAUNCHER_KEYS,
        "model.apply_lora_to_output": "adapters of the head are not planned",
        "model.use_dora": "magnitudes of DoRA are not planned",
        "quantizer": "fake quantization is not planned",
        "optimizer.offload_gradients": "give --offload-optimizer cpu",
        "ac_mode": "full checkpointing is planned",
        "ac_option": "full checkpointing is planned",
        "enable_fp8_training": "give --precision fp8",
        "expert_parallel_dim": "experts are planned on every rank",
        **no_effect(
            """
            output_dir tokenizer dataset checkpointer resume_from_checkpoint seed shuffle epochs
            max_steps_per_epoch clip_grad_norm optimizer.* lr_scheduler metric_logger profiler
            log_every_n_steps log_peak_memory_stats log_level device loss.* model.*
            save_adapter_weights_only custom_sharded_layers packed cudnn_deterministic_mode
            data_parallel_shard_dim run_val_every_n_steps dataset_val batch_size_val
            enable_async_checkpointing keep_last_n_checkpoints
            """
        ),
    },
    defaults={
        "micro_batch": 1,
        "accumulation": 1,
        "mixed": "bf16",
        "weights": "bf16",
        "sharding of several": "fsdp",
        "lora_rank if lora": 8,
    },
    micro_batch="batch_size",
    accumulation="gradient_accumulation_steps",
    changes=(
        ("recomputes activations", {"enable_activation_checkpointing": True}),
        (
            "does not hold whole logits",
            {"loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        ),
        ("keeps moments in 8 bits", {"optimizer._component_": "bitsandbytes.optim.AdamW8bit"}),
        ("moves kept activations to the host", {"enable_activation_offloading": True}),
    ),
)
