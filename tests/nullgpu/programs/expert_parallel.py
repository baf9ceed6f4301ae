"""Two ranks with half of the experts each, which send tokens to each other by their counts; prints
how many tokens each expert got."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPERTS, CHOSEN, WIDTH, TOKENS = 8, 2, 256, 1024


class Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent):  # type: ignore[no-untyped-def]
        ctx.sizes = received, sent
        y = x.new_empty(sum(received), WIDTH)
        dist.all_to_all_single(y, x.contiguous(), received, sent)
        return y

    @staticmethod
    def backward(ctx, y):  # type: ignore[no-untyped-def]
        received, sent = ctx.sizes
        x = y.new_empty(sum(sent), WIDTH)
        dist.all_to_all_single(x, y.contiguous(), sent, received)
        return x, None, None


class Mixture(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS // ranks))

    def forward(self, x: Tensor) -> Tensor:
        _, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        order = chosen.view(-1).argsort()
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = theirs.view(self.ranks, -1).sum(1).tolist()
        rows: Tensor = Sent.apply(x[order // CHOSEN], received, sent)
        parts = rows.split(theirs.view(self.ranks, -1).sum(0).tolist())
        print(f"tokens {' '.join(str(len(part)) for part in parts)}\n", end="", flush=True)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back: Tensor = Sent.apply(rows, sent, received)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, back)


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = Mixture(dist.get_world_size()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(TOKENS, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
