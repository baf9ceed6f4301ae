"""trl's SFTTrainer: a YAML file or the flags of `trl sft`."""

from typing import Final

from launcher.tools.plan_from.keys import Kind, alike, is_on, when, words
from launcher.tools.plan_from.kinds.shared import PEFT_TARGETS
from launcher.tools.plan_from.kinds.transformers import (
    TRAINER_CHANGES,
    TRAINER_KEYS,
    TRAINER_LEFT_OUT,
    TRAINER_NO_EFFECT,
)

_OTHER = "another trainer than SFT: its reference models and completions are not planned"
_OTHERS: Final = (
    *("num_generations", "max_prompt_length", "max_completion_length", "beta", "use_vllm"),
    *("ref_model", "reward_funcs"),
)
TRL = Kind(
    name="trl SFT",
    engine="trl",
    marks=(
        *("packing", "packing_strategy", "dataset_name", "max_length", "completion_only_loss"),
        *("assistant_only_loss", "use_peft", "lora_r", "dataset_text_field", "padding_free"),
        *("loss_type", "eos_token", "model_name_or_path", "dataset_train_split"),
        *_OTHERS,
    ),
    keys={
        **TRAINER_KEYS,
        "bf16": lambda value: {"mixed": "bf16" if is_on(value) else None},
        "loss_type": words(
            {
                "chunked_nll": {"loss": "chunked"},
                **alike("nll dft", loss="whole"),
            }
        ),
        "activation_offloading": when(activation_checkpointing="offload"),
    },
    left_out={
        **TRAINER_LEFT_OUT,
        **dict.fromkeys(_OTHERS, _OTHER),
        "model_init_kwargs": "give --precision",
        "router_aux_loss_coef": "the loss of routers is not planned",
    },
    no_effect=(
        f"{TRAINER_NO_EFFECT} packing packing_strategy eval_packing completion_only_loss "
        "assistant_only_loss eos_token pad_token pad_to_multiple_of padding_free "
        "chat_template_path truncation_mode shuffle_dataset eval_strategy "
        "ignore_bias_buffers datasets streaming"
    ),
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
