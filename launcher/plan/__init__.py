"""Predicted bytes of a run that nobody has started."""
