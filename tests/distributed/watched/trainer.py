"""A program of somebody else: transformers' Trainer, with evaluation and saves."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Ids(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 16) % 64
        return {"input_ids": ids, "labels": ids.clone()}


class Losses(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and logs and "loss" in logs:
            print("loss", repr(logs["loss"]), flush=True)


torch.manual_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=4,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=4,
    logging_steps=1,
    dataloader_num_workers=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=1,
)
trainer = Trainer(
    model=model, args=arguments, train_dataset=Ids(), eval_dataset=Ids(), callbacks=[Losses()]
)
trainer.train()
