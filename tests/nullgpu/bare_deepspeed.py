"""DeepSpeed in a plain loop, `python -m nullgpu.bare_deepspeed STAGE STEPS`. It reads nothing from
the device, so that every wait is DeepSpeed's own."""

import os
import sys
from typing import Any

import torch

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.zero.engine import import_deepspeed

MICRO_BATCH = 4


def main() -> None:
    stage, steps = map(int, sys.argv[1:])
    device = torch.device("cuda")
    torch.cuda.set_device(0)
    deepspeed = import_deepspeed(device)
    config = ModelConfig(vocab_size=257, context=64, layers=2, heads=2, d_model=128)
    model = GPT(config).to(device)
    settings = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},
        # Without the check a NaN would be trained on with.
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
    }
    # Weight decay for matrices alone, as usual: some of DeepSpeed's waits are for each group.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    tokens = torch.zeros(MICRO_BATCH, config.context, dtype=torch.int64, device=device)
    for _ in range(steps):
        engine.backward(engine(tokens, tokens))
        engine.step()
    torch.cuda.synchronize()
    assert engine.skipped_steps == 0
    os._exit(0)  # without what libraries do at the end of a process


if __name__ == "__main__":
    main()
