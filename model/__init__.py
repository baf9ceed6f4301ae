"""The decoder: knows nothing of ranks, devices or how its parameters are spread."""
