"""Model parallelism in one process: ranks are threads, which hand each other tensors."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from launcher.model.build import initial_value, new_decoder
from launcher.model.foreign.config import ForeignConfig
from launcher.parallel.context.foreign import LocalSequenceDecoder
from launcher.parallel.groups import ContextGroup, TensorGroup
from launcher.parallel.mesh import WHOLE_MODEL, ContextRank, ModelParallelRank, TensorRank
from launcher.parallel.tensor.foreign import LocalMatrixDecoder
from launcher.strategies.build_inputs import materialize_whole
from launcher.strategies.parameters import shards_of

RANKS = 2
TIMEOUT_S = 60.0
Learnt = tuple[Tensor, dict[str, Tensor]]
"""The loss, and the gradients by name."""


class RankThreads:
    """Ranks as threads."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = [torch.empty(0)] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=TIMEOUT_S)

    def exchange(self, index: int, x: Tensor) -> Tensor:
        """Return the x of all ranks, [ranks, ...]."""
        self.sent[index] = x.detach().clone()
        self.barrier.wait()
        received = torch.stack(self.sent)
        self.barrier.wait()
        return received

    def context_group(self, index: int) -> ContextGroup:
        """Return the context-parallel group of one rank."""
        ranks = self

        class Group(ContextGroup):
            def all_to_all(self, x: Tensor) -> Tensor:
                return ranks.exchange(index, x)[:, index]

        return Group(rank=ContextRank(size=RANKS, index=index, method="ulysses"))

    def tensor_group(self, index: int) -> TensorGroup:
        """Return the tensor-parallel group of one rank."""
        ranks = self

        class Group(TensorGroup):
            def all_gather(self, x: Tensor) -> Tensor:
                return ranks.exchange(index, x).flatten(0, 1)

            def all_reduce(self, x: Tensor) -> Tensor:
                with _disable_current_modes():  # which see no operator inside of a real one
                    return x.copy_(ranks.exchange(index, x).sum(0))

            def all_reduce_max(self, x: Tensor) -> Tensor:
                return x.copy_(ranks.exchange(index, x).amax(0))

        return Group(rank=TensorRank(size=RANKS, index=index))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return the results of `work` of every rank; raise what one of them raises."""
        found: dict[int, Any] = {}

        def keep(index: int) -> None:
            try:
                found[index] = work(index)
            except BaseException as error:
                found[index] = error
                self.barrier.abort()

        threads = [threading.Thread(target=keep, args=(index,)) for index in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [each for each in found.values() if isinstance(each, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [found[index] for index in range(RANKS)]


def require_sequence_parity(config: ForeignConfig) -> None:
    """Require halves of sequences to have the loss and the gradients of whole ones."""
    pair, ranks = _pair(config), RankThreads()
    with torch.device("meta"):
        whole = new_decoder(config)
        parts = [LocalSequenceDecoder(config, ranks.context_group(n)) for n in range(RANKS)]
    for module in (whole, *parts):
        _fill(module, config)
    loss, gradients = _learnt(whole, pair)
    halves = list(zip(*(x.chunk(RANKS, dim=1) for x in pair), strict=True))
    found: list[Learnt] = ranks.run(lambda n: _learnt(parts[n], halves[n]))
    mean_loss = sum(each for each, _ in found) / RANKS
    torch.testing.assert_close(mean_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        mean = sum(each[name] for _, each in found) / RANKS
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=5e-6)


def require_matrix_parity(config: ForeignConfig) -> None:
    """Require shards of matrices to have the loss of whole ones, and their shards of gradients."""
    pair, ranks = _pair(config), RankThreads()
    places = [ModelParallelRank(tensor=TensorRank(size=RANKS, index=n)) for n in range(RANKS)]
    with torch.device("meta"):
        whole = new_decoder(config)
        parts = [LocalMatrixDecoder(config, ranks.tensor_group(n)) for n in range(RANKS)]
    _fill(whole, config)
    for module, place in zip(parts, places, strict=True):
        _fill(module, config, place)
    loss, gradients = _learnt(whole, pair)
    found: list[Learnt] = ranks.run(lambda n: _learnt(parts[n], pair))
    for (local_loss, local), place in zip(found, places, strict=True):
        torch.testing.assert_close(local_loss, loss, rtol=1e-6, atol=0)
        assert local.keys() == gradients.keys()
        for name, gradient in gradients.items():
            expected = shards_of(config, place)[name].take(gradient)
            noise = 1e-4 * gradient.abs().max().item()
            torch.testing.assert_close(local[name], expected, rtol=0, atol=noise, msg=name)


def _pair(config: ForeignConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 25), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _fill(module: nn.Module, config: ForeignConfig, place: ModelParallelRank = WHOLE_MODEL) -> None:
    shards = shards_of(config, place)

    def value(name: str, shape: torch.Size) -> Tensor:
        full_shape = shards[name].full_shape
        return shards[name].take(3 * initial_value(name, full_shape, config, seed=3, device="cpu"))

    materialize_whole(module, value, device=torch.device("cpu"), dtype=torch.float32)


def _learnt(module: nn.Module, pair: tuple[Tensor, ...]) -> Learnt:
    loss = module(*pair)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
