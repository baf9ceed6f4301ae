"""Steps of a mixture of experts whose loop is written in one of the usual ways, or with balanced
shares written down; prints each step's allocated peak."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

HOW = sys.argv[1]
EXPERTS, CHOSEN, WIDTH, TOKENS = 8, 2, 256, 1024


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        y: Tensor = getattr(self, HOW)(x, weights, chosen)
        return y

    def balanced(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in self.experts:
            rows = torch.zeros(TOKENS * CHOSEN // EXPERTS, dtype=torch.int64, device=x.device)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, rows, None])
        return y

    def where(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As nanoGPT's descendants and torchtune's first version do."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        return y

    def unnamed(this, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `where`, in a method whose first argument has another name."""
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, rows, this.experts[number](x[rows]) * weights[rows, which, None])
        return y

    def function(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return mixed([*self.experts], x, weights, chosen)

    def one_hot(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As transformers' Mixtral does, which first asks for the experts that have tokens."""
        y = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in (mask.sum((-1, -2)) > 0).nonzero():
            which, rows = torch.where(mask[number].squeeze(0))
            y.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, which, None])
        return y

    def tokens_of_any(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Masks of tokens, not of choices; the backward pass asks for them again."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            y[mask] += expert(x[mask])
        return y

    def repeated(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As DeepSeek's first code does."""
        flat, repeated = chosen.view(-1), x.repeat_interleave(CHOSEN, dim=0)
        y = torch.empty_like(repeated)
        for number, expert in enumerate(self.experts):
            y[flat == number] = expert(repeated[flat == number])
        return (y.view(TOKENS, CHOSEN, WIDTH) * weights[..., None]).sum(1)

    def counted(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sorted by expert, and split by counts that the host reads."""
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.view(-1), torch.ones_like(chosen.view(-1)))
        order = chosen.view(-1).argsort()
        return self._split(x[order // CHOSEN], counts)[order].view(TOKENS, CHOSEN, WIDTH).sum(1)

    def _split(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As torchtune's grouped experts do."""
        parts = torch.split(rows, counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def mixed(functions: list[nn.Module], x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As `tokens_of_any`, where no module says how many experts there are."""
    y = torch.zeros_like(x)
    for number, function in enumerate(functions):
        has = chosen == number
        mask = has.any(dim=-1)
        y[mask] += function(x[mask]) * (weights * has)[mask].sum(-1, keepdim=True)
    return y


def steps() -> Iterator[int]:
    model = nn.Sequential(*(Mixture() for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(TOKENS, WIDTH, device="cuda")).square().mean().backward()
        yield torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()


for peak in steps():
    print("peak", peak, file=sys.stderr)
