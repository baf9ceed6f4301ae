"""The training loop somebody would write by hand, directly on DDP, FSDP2 or DeepSpeed.

No records, no progress, no phases: what launcher.train is compared with in overhead.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from launcher.optim import parameter_groups
from model.config import ModelConfig
from model.gpt import GPT

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    model: ModelConfig
    micro_batch: int
    bf16: bool


def step_function(kind: str, setting: Setting) -> Step:
    if kind.startswith("zero"):
        return _deepspeed(int(kind[-1]), setting)
    if kind == "accelerate":
        return _accelerate(setting)
    gpt = GPT(setting.model)
    module: nn.Module = gpt
    if kind == "ddp":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(module)
    optimizer = _adamw(module)

    def step(tokens: Tensor, targets: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setting.bf16):
            loss = module(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _deepspeed(stage: int, setting: Setting) -> Step:
    from launcher.strategies.zero import import_deepspeed

    deepspeed = import_deepspeed(torch.device("cpu"))
    module = GPT(setting.model)
    bucket = setting.model.block_parameter_count
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=_adamw(module), config=config)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets))
        engine.step()

    return step


def _accelerate(setting: Setting) -> Step:
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    model = setting.model
    shape = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.context,
        n_embd=model.d_model,
        n_layer=model.layers,
        n_head=model.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if setting.bf16 else "no")
    # A user of accelerate takes torch's default AdamW.
    plain = GPT2LMHeadModel(shape)
    module, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def step(tokens: Tensor, targets: Tensor) -> None:
        # GPT2LMHeadModel shifts labels itself: the same T - 1 predictions, near enough to ours.
        loss = module(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    # The usual two groups: no decay for biases and norms.
    return torch.optim.AdamW(parameter_groups(module, 0.1), lr=1e-3, fused=True)
