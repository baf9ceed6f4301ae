"""The training loop somebody would write by hand, directly on DDP, FSDP2 or DeepSpeed.

No records, no progress, no phases: what launcher.train is compared with in overhead.py.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))  # found where nothing is installed

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.optim.entry import parameter_groups

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    model: ModelConfig
    micro_batch: int
    bf16: bool
    device_type: str = "cpu"
    compile: bool = False


def step_function(kind: str, setting: Setting) -> Step:
    if kind.startswith("zero"):
        return _deepspeed(int(kind[-1]), setting)
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
    module = GPT(setting.model)
    engine = deepspeed_engine(module, _adamw(module), stage, setting)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets))
        engine.step()

    return step


def deepspeed_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, setting: Setting
) -> Any:
    """Buckets of one block, as the launcher has them; DeepSpeed's default of 5e8 elements would
    take 2 GB for a model of any size."""
    from launcher.strategies.zero.engine import import_deepspeed

    deepspeed = import_deepspeed(torch.device(setting.device_type))
    bucket = setting.model.block_parameter_count
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": setting.bf16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": setting.device_type == "cuda",
        },
    }
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    # The usual two groups: no decay for biases and norms.
    return torch.optim.AdamW(parameter_groups(module, 0.1), lr=1e-3, fused=True)
