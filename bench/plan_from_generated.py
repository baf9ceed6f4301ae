"""Configs of other people's trainers for plan_from_rehearsals.py, generated from a seed.

Each trainer has axes. Values of an axis are shuffled and dealt out in turn, so that each of them
occurs before one of them occurs again.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SEED: Final = 36
STEPS: Final = 4
Axes = Mapping[str, Sequence[Any]]
Chosen = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One run: its files, and the command that trains with them."""

    key: str
    trainer: str
    environment: str
    files: dict[str, str]
    planned: tuple[str, ...]
    """Names of the files that are given to `plan --from`."""
    command: str
    """`{bin}` stands for the environment's programs, `{programs}` for bench/published/programs."""
    gpus: int
    chosen: dict[str, Any]


Trainers = Mapping[str, tuple[Axes, int, Callable[[str, Chosen], Generated]]]
"""Name -> axes, how many runs, and what makes a run of chosen values."""
MODELS: Final = (
    *("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen2.5-0.5B"),
    *("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"),
)
COMMON: Final[Axes] = {
    "model": MODELS,
    "length": (512, 1024, 2048),
    "micro": (1, 2, 4),
    "accumulation": (1, 2, 4),
    "checkpointing": (False, True),
}
QUIET: Final = {"report_to": "none", "save_strategy": "no", "max_steps": STEPS}
_SHARDED_BLOCK: Final = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def generated(trainers: Trainers) -> Iterator[Generated]:
    """Yield all runs; a trainer's do not depend on the others'."""
    for name, (axes, count, make) in trainers.items():
        dealt = random.Random(f"{SEED} {name}")
        hands = [_dealt(values, count, dealt) for values in axes.values()]
        for number, hand in enumerate(zip(*hands, strict=True)):
            yield make(f"{name}-{number + 1}", dict(zip(axes, hand, strict=True)))


def _dealt(values: Sequence[Any], count: int, dealt: random.Random) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += dealt.sample(values, len(values))
    return found[:count]


def _arguments(chosen: Chosen, **more: Any) -> dict[str, Any]:
    """TrainingArguments and ModelArguments of causal_lm.py."""
    weights, computed = chosen["precision"]
    return {
        "output_dir": "out",
        "model_name_or_path": chosen["model"],
        "dtype": weights,
        "block_size": chosen["length"],
        "per_device_train_batch_size": chosen["micro"],
        "gradient_accumulation_steps": chosen["accumulation"],
        "gradient_checkpointing": chosen["checkpointing"],
        "learning_rate": 1e-5,
        **({computed: True} if computed else {}),
        **QUIET,
        **more,
    }


def _trainer(key: str, chosen: Chosen) -> Generated:
    more = {"optim": chosen["optim"], "attn_implementation": chosen["attention"]}
    if chosen["liger"]:
        more["use_liger_kernel"] = True
    ranks = chosen["ranks"]
    start = "{bin}/python" if ranks == 1 else f"{{bin}}/torchrun --nproc-per-node {ranks}"
    return Generated(
        key=key,
        trainer="transformers Trainer",
        environment="torch-2.13",
        files={"args.json": _json(_arguments(chosen, **more))},
        planned=("args.json",),
        command=f"{start} {{programs}}/causal_lm.py args.json",
        gpus=ranks,
        chosen=dict(chosen),
    )


def _accelerate(key: str, chosen: Chosen) -> Generated:
    ranks, sharding = chosen["ranks"], chosen["sharding"]
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if sharding == "ddp" else "FSDP",
        "mixed_precision": chosen["precision"][1] or "no",
        "num_machines": 1,
        "num_processes": ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    section: dict[str, Any] = dict(_SHARDED_BLOCK)
    if sharding == "fsdp2":
        section |= {"fsdp_version": 2, "fsdp_reshard_after_forward": chosen["reshard"]}
    elif sharding == "fsdp1":
        word = "FULL_SHARD" if chosen["reshard"] else "SHARD_GRAD_OP"
        section |= {"fsdp_version": 1, "fsdp_sharding_strategy": word, "fsdp_use_orig_params": True}
    if sharding != "ddp":
        section["fsdp_activation_checkpointing"] = chosen["checkpointing"]
        document["fsdp_config"] = section
    arguments = _arguments(chosen, optim=chosen["optim"])
    if sharding != "ddp":  # Trainer refuses both
        arguments["gradient_checkpointing"] = False
    return Generated(
        key=key,
        trainer="accelerate and Trainer",
        environment="torch-2.13",
        files={"accelerate.yaml": as_yaml(document), "args.json": _json(arguments)},
        planned=("accelerate.yaml", "args.json"),
        command="{bin}/accelerate launch --config_file accelerate.yaml "
        "{programs}/causal_lm.py args.json",
        gpus=ranks,
        chosen=dict(chosen),
    )


def _deepspeed(key: str, chosen: Chosen) -> Generated:
    section: dict[str, Any] = {"stage": chosen["stage"]}
    if chosen["offload"]:
        section["offload_optimizer"] = {"device": "cpu"}
    document = {
        "zero_optimization": section,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }
    if chosen["auto buckets"]:
        names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
        section |= dict.fromkeys((*names, "stage3_param_persistence_threshold"), "auto")
    ranks = chosen["ranks"]
    return Generated(
        key=key,
        trainer="DeepSpeed and Trainer",
        environment="torch-2.13",
        files={
            "args.json": _json(_arguments(chosen, deepspeed="zero.json")),
            "zero.json": _json(document),
        },
        planned=("args.json",),
        command=f"{{bin}}/torchrun --nproc-per-node {ranks} {{programs}}/causal_lm.py args.json",
        gpus=ranks,
        chosen=dict(chosen),
    )


def _trl(key: str, chosen: Chosen) -> Generated:
    document: dict[str, Any] = {
        "model_name_or_path": chosen["model"],
        "dataset_name": "texts",
        "max_length": chosen["length"],
        "per_device_train_batch_size": chosen["micro"],
        "gradient_accumulation_steps": chosen["accumulation"],
        "gradient_checkpointing": chosen["checkpointing"],
        "learning_rate": 1e-5,
        "output_dir": "out",
        **QUIET,
    }
    if chosen["adapters"]:
        document |= {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}
    if chosen["adapters"] == "qlora":
        document["load_in_4bit"] = True
    if chosen["dtype"]:
        document["dtype"] = chosen["dtype"]
    if chosen["optim"]:
        document["optim"] = chosen["optim"]
    ranks = chosen["ranks"]
    return Generated(
        key=key,
        trainer="trl sft",
        environment="torch-2.13",
        files={"sft.yaml": as_yaml(document)},
        planned=("sft.yaml",),
        command=f"{{bin}}/trl sft --config sft.yaml --num_processes {ranks}",
        gpus=ranks,
        chosen=dict(chosen),
    )


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def as_yaml(document: Mapping[str, Any]) -> str:
    """Write YAML, of which JSON's values are part."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in document.items())


_PRECISIONS: Final = (
    *(("float32", "bf16"), ("bfloat16", "bf16"), ("float32", None), ("bfloat16", None)),
    ("float32", "fp16"),
)
TRAINERS: Final[Trainers] = {
    "trainer": (
        {
            **COMMON,
            "precision": _PRECISIONS,
            "optim": ("adamw_torch", "adamw_torch_fused", "adafactor", "adamw_bnb_8bit", "sgd"),
            "attention": ("sdpa", "sdpa", "eager"),
            "liger": (False, False, True),
            "ranks": (1, 1, 2),
        },
        6,
        _trainer,
    ),
    "accelerate": (
        {
            **COMMON,
            "precision": _PRECISIONS[:3],
            "optim": ("adamw_torch", "adamw_torch_fused"),
            "sharding": ("fsdp2", "fsdp1", "ddp"),
            "reshard": (True, False),
            "ranks": (2,),
        },
        6,
        _accelerate,
    ),
    "deepspeed": (
        {
            **COMMON,
            "precision": (("float32", "bf16"), ("bfloat16", "bf16"), ("float32", "fp16")),
            "stage": (1, 2, 3),
            "offload": (False,),
            "auto buckets": (False, True),
            "ranks": (2,),
        },
        6,
        _deepspeed,
    ),
    "trl": (
        {
            **COMMON,
            "adapters": ("", "lora", "qlora"),
            "dtype": ("", "bfloat16"),
            "optim": ("", "adamw_torch_fused", "adamw_bnb_8bit"),
            "ranks": (1, 1, 2),
        },
        6,
        _trl,
    ),
}
