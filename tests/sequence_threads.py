"""Context parallelism in one process: ranks are threads, which hand each other tensors."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launcher.model.build import initial_value, new_decoder
from launcher.model.foreign.config import ForeignConfig
from launcher.parallel.context.foreign import LocalSequenceDecoder
from launcher.parallel.groups import ContextGroup
from launcher.parallel.mesh import ContextRank
from launcher.strategies.build_inputs import materialize_whole

RANKS = 2
TIMEOUT_S = 60.0


class RankThreads:
    """Ranks as threads."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = [torch.empty(0)] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=TIMEOUT_S)

    def group(self, index: int) -> ContextGroup:
        """Return the context-parallel group of one rank."""
        ranks = self

        class Group(ContextGroup):
            def all_to_all(self, x: Tensor) -> Tensor:
                ranks.sent[index] = x.detach().clone()
                ranks.barrier.wait()
                received = torch.stack([sent[index] for sent in ranks.sent])
                ranks.barrier.wait()
                return received

        return Group(rank=ContextRank(size=RANKS, index=index, method="ulysses"))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return the results of `work` of every rank."""
        found: dict[int, Any] = {}

        def keep(index: int) -> None:
            found[index] = work(index)

        threads = [threading.Thread(target=keep, args=(index,)) for index in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[index] for index in range(RANKS)]


def require_parity(config: ForeignConfig) -> None:
    """Require halves of sequences to have the loss and the gradients of whole ones."""
    tokens = torch.randint(
        3, config.vocab_size, (2, 25), generator=torch.Generator().manual_seed(0)
    )
    pair = tokens[:, :-1], tokens[:, 1:]
    ranks = RankThreads()
    with torch.device("meta"):
        whole = new_decoder(config)
        parts = [LocalSequenceDecoder(config, ranks.group(n)) for n in range(RANKS)]
    for module in (whole, *parts):
        materialize_whole(
            module,
            lambda name, shape: 3 * initial_value(name, shape, config, seed=3, device="cpu"),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    loss, gradients = _learnt(whole, pair)
    halves = list(zip(*(x.chunk(RANKS, dim=1) for x in pair), strict=True))
    found = ranks.run(lambda n: _learnt(parts[n], halves[n]))
    mean_loss = sum(each for each, _ in found) / RANKS
    torch.testing.assert_close(mean_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        mean = sum(each[name] for _, each in found) / RANKS
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=5e-6)


def _learnt(module: nn.Module, pair: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = module(*pair)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
