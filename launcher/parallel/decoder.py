"""The decoder of one rank of a mesh."""

from launcher.config.model import part_of
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.parallel.sequence.neighbours import Neighbours
from launcher.parallel.sequence.sliced import SlicedGPT
from launcher.parallel.tensor.decoder import connect
from launcher.parallel.tensor.peers import Peers


def decoder(config: ModelConfig, neighbours: Neighbours | None, peers: Peers | None) -> GPT:
    """The model, on the device and under the modes of the context that this is called in."""
    own = config if peers is None else part_of(config, peers.share.ranks, peers.share.index)
    model = GPT(own) if neighbours is None else SlicedGPT(own, neighbours)
    if peers is not None:
        connect(model, config, peers)
    return model
