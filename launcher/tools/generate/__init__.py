"""Text from trained weights: a cache of keys and values, and how the next token is chosen."""
