"""A program of somebody else: a plain loop of transformer layers, far more steps than needed."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(how: str) -> None:
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layers = [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True) for _ in range(4)]
    model: nn.Module = nn.Sequential(*layers).cuda()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif several:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    if how == "compiled":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if how == "early":
        torch.cuda.memory._record_memory_history(max_entries=10)
    inputs = torch.randn(8, 512, 1024, device="cuda")
    for step in range(3 if how == "watch" else 1000):
        if how == "late" and step == 1:
            torch.cuda.memory._record_memory_history("state", max_entries=10)
            torch.cuda.memory.reset_accumulated_memory_stats()
        loss = model(inputs).float().square().mean()
        if how == "resets":
            torch.cuda.reset_peak_memory_stats()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "late" and step == 1:
            snapshot = torch.cuda.memory._snapshot()
            print("own", len(snapshot["device_traces"][0]) > 0)
            torch.cuda.memory._record_memory_history(None)
        if how == "loop":
            while loss.item() < 5:
                pass
        if how == "values":
            fails = bool(torch.isnan(loss))
            holds = bool(torch.isfinite(loss))
            print("answers", fails, holds, loss.item())
            print("known", torch.tensor([1, 2, 3]).cuda().tolist())
        print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        print("now", torch.cuda.memory_allocated(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
