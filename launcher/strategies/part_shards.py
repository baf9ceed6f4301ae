"""The training state of a rank that has parts of matrices, as places in the whole ones."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from launcher.parallel.tensor.parts import Parts
from launcher.strategies.flat_shards import (
    NativeState,
    OwnShapes,
    Shard,
    TrainingState,
)
from launcher.strategies.updates import Updated
from launcher.util.sizes import even_part


def native_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parts: Parts | None
) -> TrainingState:
    """That of a module of plain tensors or DTensors, and a torch optimizer over them."""
    if parts is None:
        return NativeState(module, optimizer)
    return PartState(NativeState(module, optimizer, (parts.copy, parts.copies)), parts)


class PartState:
    """`TrainingState` over that of the parts; its ranges of parts are in whole tensors here.

    What is whole on all ranks of the tensor-parallel group they write together, each an even part.
    """

    def __init__(self, inner: TrainingState, parts: Parts) -> None:
        self._inner = inner
        self.parts = parts
        self.shapes = {name: parts.cuts[name].whole for name in inner.shapes}
        self.kinds = inner.kinds
        self.own_shapes: OwnShapes = {}  # of optimizers that are not elementwise: refused

    def saved(self) -> Iterator[Shard]:
        """This rank's share, and nobody else's."""
        share = self.parts.tensor_group.share
        for shard in self._inner.saved():
            if self.parts.cuts[shard.name].is_whole:
                begin, end = even_part(shard.data.numel(), share.index, share.ranks)
                yield replace(shard, start=shard.start + begin, data=shard.data[begin:end])
            else:
                yield from self._placed(shard)

    def loaded(self) -> Iterator[Shard]:
        """All that this rank holds."""
        for shard in self._inner.loaded():
            yield from self._placed(shard)  # views: filled before the inner state goes on

    def frozen(self) -> Iterator[Shard]:
        """None: adapters are refused where matrices are cut."""
        return iter(())

    def updated(self) -> Updated:
        """Parts, under their own numbers: masks are refused where matrices are cut."""
        return self._inner.updated()

    def counters(self) -> dict[str, float]:
        """The optimizer's."""
        return self._inner.counters()

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """The inner state's business."""
        self._inner.finish_load(counters)

    def _placed(self, shard: Shard) -> Iterator[Shard]:
        for piece in self.parts.cuts[shard.name].pieces(shard.start, shard.stop):
            begin = piece.offset - shard.start
            yield replace(
                shard,
                start=piece.start,
                data=shard.data[begin : begin + piece.numel],
                run=piece.run,
                pitch=piece.pitch,
            )
