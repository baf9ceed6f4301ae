"""In a browser: launcher/strategies/shapes.py, from what it has said before."""

from launcher.model.config import ModelConfig
from launcher.tools.site.inside.stored import shapes_of_one_block

__all__ = ["shapes_of_one_block", "tied_modules"]


def tied_modules(model: ModelConfig) -> dict[str, str]:
    """Return the head of our own decoder, the only one here, if it is tied."""
    embedding = shapes_of_one_block(model)[0][0].rpartition(".")[0]
    return {"head": embedding} if model.tied else {}
