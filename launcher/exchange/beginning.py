"""The weights that `--init-from` names, wherever they are from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from launcher.checkpoint.checkpointer import Weights
from launcher.checkpoint.weights import open_weights as open_checkpoint
from launcher.config.beginning import HF_CONFIG
from launcher.errors import naming
from launcher.exchange.source import Source
from launcher.strategies.flat_shards import Shard


class _Folder:
    """A folder of transformers, read in place."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_into(self, shard: Shard) -> None:
        shard.data.copy_(self._source.read_range(shard.name, shard.start, shard.stop))


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """The weights in a folder of transformers, in a run (its newest checkpoint) or a checkpoint.

    Their names and shapes are checked, their values not before they are read.

    Raises:
        UserError: there are none, or they are damaged.
    """
    with naming("--init-from"):
        if (folder / HF_CONFIG).is_file():
            with Source(folder) as source:
                yield _Folder(source)
        else:
            with open_checkpoint(folder) as weights:
                yield weights.reader
