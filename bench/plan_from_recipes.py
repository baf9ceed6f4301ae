"""Recipes of trainers with configs of their own, for plan_from_rehearsals.py."""

from typing import Any, Final

from plan_from_generated import COMMON, QUIET, Chosen, Generated, Trainers, as_yaml


def _llama_factory(key: str, chosen: Chosen) -> Generated:
    how = chosen["tuning"]
    document: dict[str, Any] = {
        "stage": "pt",
        "do_train": True,
        "model_name_or_path": chosen["model"],
        "finetuning_type": "lora" if "lora" in how else "full",
        "dataset": "texts",
        "dataset_dir": "factory",
        "template": "default",
        "cutoff_len": chosen["length"],
        "per_device_train_batch_size": chosen["micro"],
        "gradient_accumulation_steps": chosen["accumulation"],
        "learning_rate": 1e-5,
        "bf16": True,
        "output_dir": "out",
        "overwrite_output_dir": True,
        "preprocessing_num_workers": 1,
        **QUIET,
    }
    if not chosen["checkpointing"]:
        document["disable_gradient_checkpointing"] = True
    if "lora" in how:
        document |= {"lora_rank": 16, "lora_target": "all"}
    if how == "qlora":
        document["quantization_bit"] = 4
    if how == "pure":
        document["pure_bf16"] = True
    ranks = chosen["ranks"]
    # On several GPUs `llamafactory-cli train` starts this itself.
    several = (
        f"{{bin}}/python -m torch.distributed.run --nproc-per-node {ranks} -m llamafactory.launcher"
    )
    start = "{bin}/llamafactory-cli train"
    return Generated(
        key=key,
        trainer="LLaMA-Factory",
        environment="llama-factory",
        files={"recipe.yaml": as_yaml(document)},
        planned=("recipe.yaml",),
        command=f"{start if ranks == 1 else several} recipe.yaml",
        gpus=ranks,
        chosen=dict(chosen),
    )


def _litgpt(key: str, chosen: Chosen) -> Generated:
    how, ranks = chosen["tuning"], chosen["ranks"]
    train = {
        "micro_batch_size": chosen["micro"],
        "global_batch_size": chosen["micro"] * chosen["accumulation"] * ranks,
        "max_seq_length": chosen["length"],
        "max_steps": 4,
        "epochs": 10,
        "lr_warmup_steps": 2,
        "save_interval": 1000,
        "log_interval": 1,
    }
    data = {
        "class_path": "litgpt.data.JSON",
        "init_args": {"json_path": "instructions.json", "val_split_fraction": 0.1},
    }
    document: dict[str, Any] = {
        "checkpoint_dir": f"checkpoints/{chosen['model']}",
        "out_dir": "out",
        "precision": chosen["precision"],
        "devices": ranks,
        "data": data,
        "train": train,
        "eval": {"interval": 1000, "final_validation": False},
    }
    if "lora" in how:
        names = ("query", "key", "value", "projection", "mlp", "head")
        document |= {f"lora_{name}": name not in ("head",) for name in names}
        document |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    if how == "qlora":
        document["quantize"] = "bnb.nf4"
    command = "finetune_lora" if "lora" in how else "finetune_full"
    return Generated(
        key=key,
        trainer="LitGPT",
        environment="torch-2.4",
        files={"lit.yaml": as_yaml(document)},
        planned=("lit.yaml",),
        command=f"{{bin}}/litgpt {command} --config lit.yaml",
        gpus=ranks,
        chosen=dict(chosen),
    )


_OF_LITGPT: Final = ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M")
RECIPES: Final[Trainers] = {
    "llama-factory": (
        {**COMMON, "tuning": ("full", "lora", "pure", "qlora"), "ranks": (1, 1, 2)},
        5,
        _llama_factory,
    ),
    "litgpt": (
        {
            "model": _OF_LITGPT,
            **{name: COMMON[name] for name in ("length", "micro", "accumulation")},
            "precision": ("bf16-true", "bf16-mixed", "32-true"),
            "tuning": ("full", "full", "lora", "qlora"),
            "ranks": (1, 1, 2),
        },
        5,
        _litgpt,
    ),
}
