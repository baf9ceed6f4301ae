"""LitGPT's YAML files of config_hub: `litgpt pretrain`, `finetune_full` and `finetune_lora`."""

from typing import Any

from launcher.tools.plan_from.keys import (
    Facts,
    Kind,
    Unknown,
    alike,
    is_on,
    no_effect,
    number_of,
    switch,
    text,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.transformers import lora_dropout


def _model(value: Any) -> Facts:
    """Read a folder as `litgpt download` names it: checkpoints/ORG/NAME."""
    return {"model": "/".join(str(value).rstrip("/").split("/")[-2:])} if is_on(value) else {}


def _devices(value: Any) -> Facts:
    number = number_of(value) or 0  # -1: all that are there
    return {"per_machine": int(number)} if number > 0 else {}


def _quantized(value: Any) -> Facts:
    if not is_on(value):
        return {}
    name = str(value).removeprefix("bnb.")
    if name.startswith(("nf4", "fp4")):
        return {"quantize_base": "nf4"}
    if name.startswith("int8"):
        return {"quantize_base": "int8"}
    raise Unknown("is planned as not quantized")


LITGPT = Kind(
    name="LitGPT YAML",
    engine="litgpt",
    marks=(
        "train.micro_batch_size train.global_batch_size checkpoint_dir train.max_norm "
        "train.max_seq_length eval.interval precision train.lr_warmup_steps lora_query out_dir "
        "model_name train.save_interval"
    ),
    keys={
        "checkpoint_dir": lambda value: _model(value) | {"fine-tunes": True},
        "initial_checkpoint_dir": _model,
        "model_name": text("model"),
        "model.name": text("model"),
        "precision": words(
            {
                "bf16-true": {"mixed": "bf16", "weights": "bf16"},
                "bf16-mixed": {"mixed": "bf16"},
                "16-mixed": {"mixed": "fp16"},
                "32-true": {"mixed": None},
            },
            otherwise="is planned as bf16-mixed",
        ),
        "quantize": _quantized,
        "devices": _devices,
        "num_nodes": whole("machines"),
        "train.micro_batch_size": whole("micro_batch"),
        "train.global_batch_size": whole("global_batch"),
        "train.max_seq_length": whole("seq_len"),
        "model.block_size": whole("block_size"),
        "lora_r": whole("lora_rank"),
        "lora_dropout": lora_dropout,
        "lora_query": switch("target q"),
        "lora_key": switch("target k"),
        "lora_value": switch("target v"),
        "lora_projection": switch("target proj"),
        "lora_mlp": switch("target mlp"),
        "optimizer": words(
            alike("AdamW GaLoreAdamW", optimizer="adamw"), otherwise="is planned as AdamW"
        ),
        "optimizer.class_path": words(
            {"AdamW": {"optimizer": "adamw"}, "SGD": {"optimizer": "sgd", "momentum": 0.0}},
            otherwise="is planned as AdamW",
        ),
        "lora_head": "adapters of the head are not planned",
        "model_config": "the named model is planned",
        "optimizer.init_args.rank": "GaLore's projections are planned as AdamW",
        **no_effect(
            """
            out_dir seed data train.* eval.* logger_name resume tokenizer_dir access_token
            optimizer.init_args.* lora_alpha generate_* log.* model.* wandb_*
            """
        ),
    },
    defaults={
        "micro_batch": 1,
        "mixed": "bf16",
        "sharding of several": "fsdp",
        "lora_dropout if lora": 0.05,
    },
    micro_batch="train.micro_batch_size",
    changes=(
        ("keeps weights and moments in bf16", {"precision": "bf16-true"}),
        ("keeps the frozen weights in 4 bits", {"quantize": "bnb.nf4"}),
        ("shards states over 2 GPUs", {"devices": 2}),
        ("shards states over 4 GPUs", {"devices": 4}),
        ("shards states over 8 GPUs", {"devices": 8}),
    ),
)
