"""A causal language model trained by transformers' Trainer, for plan_from_rehearsals.py.

python causal_lm.py ARGUMENTS.json      # ModelArguments beside TrainingArguments, as in run_clm.py
"""

import sys
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    """Fields of these names in transformers' run_clm.py."""

    model_name_or_path: str
    dtype: str = "auto"
    attn_implementation: str | None = None
    block_size: int = 1024


class Ids(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of one token, each as long as a block."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((self.length,), 5)
        return {"input_ids": ids, "labels": ids.clone()}


parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_arguments, arguments = parser.parse_json_file(sys.argv[1])
# After TrainingArguments, which switch on ZeRO-3's partitioning of a model that is being loaded.
model = AutoModelForCausalLM.from_pretrained(
    model_arguments.model_name_or_path,
    dtype=model_arguments.dtype,
    attn_implementation=model_arguments.attn_implementation,
)
Trainer(model=model, args=arguments, train_dataset=Ids(model_arguments.block_size)).train()
