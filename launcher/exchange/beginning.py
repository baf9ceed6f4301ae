"""The weights that `--init-from` names, wherever they are from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from launcher.checkpoint.checkpointer import Weights
from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.checkpoint.weights import open_weights as open_checkpoint
from launcher.config.beginning import HF_CONFIG
from launcher.errors import naming
from launcher.exchange.source import Source
from launcher.strategies.flat_shards import Shard
from launcher.strategies.places import Places


class _Folder:
    """A folder of transformers, read in place."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_into(self, shard: Shard) -> None:
        places, start = shard.places, shard.start
        if places.contiguous:
            shard.data.copy_(self._source.read_range(shard.name, start, places.stop))
            return
        # What lies in the gaps is read, too: a few runs at a time, so that it takes little memory.
        runs = max(1, CHUNK_ELEMENTS // places.pitch)
        for part in shard.data.split(runs * places.run):
            stop = Places.of(start, len(part), places.run, places.pitch).stop
            whole = self._source.read_range(shard.name, start, stop)
            part.view(-1, places.run).copy_(whole.unfold(0, places.run, places.pitch))
            start += runs * places.pitch


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
