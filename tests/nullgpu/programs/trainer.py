"""transformers' Trainer over all GPUs of the process (DataParallel), or over the ranks of torchrun:
saves, evaluates, and prints how many GPUs it has used, as JSON."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((128,), 5)
        return {"input_ids": tokens, "labels": tokens.clone()}


sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 999}
model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, **sizes))
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    max_steps=2,
    bf16=True,
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
used = sum(torch.cuda.max_memory_allocated(i) > 0 for i in range(torch.cuda.device_count()))
sys.stdout.write(
    json.dumps({"rank": arguments.process_index, "used": used}) + "\n"
)  # in one piece, beside those of others
