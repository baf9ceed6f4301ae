"""A checkpoint as the weights of a model, for who does not go on training."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.document import DamagedCheckpoint
from launcher.checkpoint.extra import saved_model
from launcher.checkpoint.files import RangeReader
from launcher.checkpoint.index import Checkpoint
from launcher.checkpoint.store import candidates
from launcher.model.config import ModelConfig
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import trained_shapes
from launcher.util.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The parameters of a model, read one by one; what was not written so is refused as damaged."""

    checkpoint: Checkpoint
    config: ModelConfig
    reader: RangeReader

    def read(self, name: str) -> Tensor:
        """The parameter of that name, fp32, in its shape."""
        shape = self.checkpoint.shapes[name]
        data = torch.empty(math.prod(shape))
        self.reader.read_into(Shard(name=name, kind=PARAM, start=0, data=data))
        return data.view(shape)


@contextmanager
def open_weights(source: Path) -> Iterator[Weights]:
    """Those of a checkpoint, or of the newest one of a run folder; reads none of them yet.

    Raises:
        UserError: there is none, it is damaged, or does not say which model it holds.
    """
    checkpoint = _newest(source)
    config = saved_model(checkpoint.extra)
    if config is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: does not say which model it holds; "
            "give one that launcher.train has saved"
        )
    checkpoint.check_model(trained_shapes(config), checkpoint.kinds, list(checkpoint.counters))
    with RangeReader(checkpoint) as reader:
        yield Weights(checkpoint=checkpoint, config=config, reader=reader)


def _newest(source: Path) -> Checkpoint:
    while True:
        try:
            path = candidates(source)[0]
        except UserError as error:
            raise UserError(str(error).removeprefix("--resume ")) from None
        try:
            return Checkpoint.open(path)
        except DamagedCheckpoint:
            # A run that is alive saves a newer one and removes this one, with --keep.
            if path == source or path.exists():
                raise
