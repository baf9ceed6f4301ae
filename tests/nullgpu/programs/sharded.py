"""Eight linear layers of 2,048 x 2,048 over two ranks or more, `sharded.py WAY`: prints, as JSON,
the bytes of its states between steps and their peak."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH = 8, 2048


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layers().cuda())


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Linear})
    device = torch.cuda.current_device()
    return FullyShardedDataParallel(layers(), auto_wrap_policy=policy, device_id=device)


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = layers().cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: nn.Module) -> int:
    """Three steps; returns the bytes that stay between two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.3)  # NCCL's watchdog gives a step's buffers back every 100 ms
    return torch.cuda.memory_allocated()


def deepspeed(**zero: object) -> int:
    """As `train`, by DeepSpeed's engine."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"reduce_bucket_size": 1000000, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero["stage"] == 3):
        model = layers()
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    for _ in range(3):
        batch = torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
    assert engine.skipped_steps == 0
    return torch.cuda.memory_allocated()


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
way = sys.argv[1]
if way == "zero3":
    between = deepspeed(stage=3)
elif way == "zero2-offload":
    between = deepspeed(stage=2, offload_optimizer={"device": "cpu"})
else:
    between = train({"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2}[way]())
found = {"rank": dist.get_rank(), "between": between, "peak": torch.cuda.max_memory_allocated()}
sys.stdout.write(json.dumps(found) + "\n")  # in one piece, beside those of others
dist.destroy_process_group()
