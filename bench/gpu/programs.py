"""Training programs as people write them, which know nothing of this project.

    python bench/gpu/programs.py loop|accumulating|trainer

Weights and tokens are random: nothing is downloaded. Prints the peaks of torch's allocator and the
seconds of a step, the mean of the last 20 of 25, as one line of JSON.
"""

import json
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WARMUP, STEPS = 5, 25
LLAMA = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    "max_position_embeddings": 2048,
}
QWEN = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
}


class Clock(TrainerCallback):  # type: ignore[misc]  # mypy does not see transformers' types
    """Seconds of the steps after the first few."""

    def __init__(self) -> None:
        self.steps, self.began_s = 0, 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        if self.steps in (WARMUP, STEPS):
            torch.cuda.synchronize()
        if self.steps == WARMUP:
            self.began_s = time.perf_counter()
        elif self.steps == STEPS:
            step_s = (time.perf_counter() - self.began_s) / (STEPS - WARMUP)
            found = {
                "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
                "step_s": step_s,
            }
            print(json.dumps(found), flush=True)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def random_model(name: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def loop() -> None:
    """GPT-2 of 124M under autocast, 16 sequences of 1,024 tokens, torch's AdamW and clipping."""
    clock, device = Clock(), torch.device("cuda")
    model = random_model("gpt2").to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for _ in range(STEPS):
        ids = torch.randint(0, 50257, (16, 1024), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()


def accumulating() -> None:
    """A Qwen3 of 0.6B all in bf16, 4 micro-batches of 2 x 2,048 tokens, torch's fused AdamW."""
    clock, device = Clock(), torch.device("cuda")
    model = random_model("qwen3", **QWEN).to(device, torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(STEPS):
        for _ in range(4):
            ids = torch.randint(0, 151936, (2, 2048), device=device)
            loss = model(input_ids=ids, labels=ids).loss / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()


def trainer() -> None:
    """A Llama of 1B under transformers' Trainer: bf16, gradient checkpointing, 8 x 2,048 tokens."""
    arguments = TrainingArguments(
        output_dir="/tmp/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        bf16=True,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = random_model("llama", **LLAMA)
    data = Tokens(32000, 2048)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()


if __name__ == "__main__":
    {"loop": loop, "accumulating": accumulating, "trainer": trainer}[sys.argv[1]]()
