"""trl's SFTTrainer: a YAML file or the flags of `trl sft`."""

from typing import Any, Final

from launcher.tools.plan_from.keys import (
    Facts,
    Kind,
    Unknown,
    alike,
    no_effect,
    switch,
    when,
    whole,
    words,
)
from launcher.tools.plan_from.kinds.adapters import PEFT_TARGETS
from launcher.tools.plan_from.kinds.shared import ATTENTION, WEIGHTS, stage
from launcher.tools.plan_from.kinds.transformers import TRAINER_CHANGES, TRAINER_KEYS

_EIGHT: Final[Facts] = {"gpus if unsaid": 8}
_FSDP: Final[Facts] = {"strategy": "fsdp", "reshard_after_forward": True, **_EIGHT}
_SHIPPED: Final = {
    "single_gpu": {"strategy": "single"},
    "multi_gpu": {"strategy": "ddp", **_EIGHT},
    **{f"zero{n}": {**stage(n), "engine": "deepspeed", **_EIGHT} for n in (1, 2, 3)},
    **{f"fsdp{n}": {**_FSDP, "fsdp_version": n} for n in (1, 2)},
}


def _accelerate(value: Any) -> Facts:
    """Read the name of one of trl's accelerate_configs, or a file."""
    if str(value).endswith((".yaml", ".yml", ".json")):
        return {"companion config_file": value}
    if value not in _SHIPPED:
        text = "is no config that trl has"
        raise Unknown(text, absent=f"accelerate_config {value!s:.60}: {text}")
    return dict(_SHIPPED[value])


def _length(value: Any) -> Facts:
    if str(value).lower() in ("none", "null"):
        raise Unknown("sequences are not cut short: give --seq-len N")
    return whole("seq_len")(value)


_OTHER = "another trainer than SFT: its reference models and completions are not planned"
_OTHERS: Final = (
    "num_generations max_prompt_length max_completion_length beta use_vllm ref_model reward_funcs"
)
TRL = Kind(
    name="trl SFT",
    engine="trl",
    marks=(
        "packing packing_strategy dataset_name max_length completion_only_loss assistant_only_loss "
        "use_peft lora_r dataset_text_field padding_free loss_type eos_token model_name_or_path "
        f"dataset_train_split {_OTHERS}"
    ),
    keys={
        **TRAINER_KEYS,
        "bf16": switch("mixed", "bf16", None),
        "loss_type": words({"chunked_nll": {"loss": "chunked"}, **alike("nll dft", loss="whole")}),
        "activation_offloading": when(activation_checkpointing="offload"),
        "accelerate_config": _accelerate,
        "max_length": _length,
        "model_init_kwargs.attn_implementation": ATTENTION,
        **dict.fromkeys(("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"), WEIGHTS),
        **dict.fromkeys(_OTHERS.split(), _OTHER),
        "model_init_kwargs": "of these dtype and attn_implementation are read, from YAML",
        "router_aux_loss_coef": "the loss of routers is not planned",
        **no_effect(
            """
            packing packing_strategy completion_only_loss assistant_only_loss eos_token pad_token
            pad_to_multiple_of padding_free chat_template_path truncation_mode shuffle_dataset
            ignore_bias_buffers datasets
            """
        ),
    },
    defaults={
        "micro_batch": 8,
        "accumulation": 1,
        "seq_len": 1024,
        "mixed": "bf16",
        "activation_checkpointing": "full",
        "loss": "chunked",
        "lora_rank if lora": 16,
        "lora_dropout if lora": 0.05,
        **PEFT_TARGETS,
    },
    micro_batch="per_device_train_batch_size",
    accumulation="gradient_accumulation_steps",
    changes=TRAINER_CHANGES,
)
