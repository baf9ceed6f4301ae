"""In a browser: launcher/strategies/shapes.py, from what it has said before."""

from launcher.tools.site.inside.stored import stored_shapes as shapes_of_one_block

__all__ = ["shapes_of_one_block"]
