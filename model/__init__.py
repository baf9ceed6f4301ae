"""The decoder and its options. In: a `ModelConfig` (config.py). Out: a `GPT` (gpt.py) that computes
its loss, its initial values, and its parts (parts.py).

Knows no ranks, no devices, and not how its parameters are sharded.
"""
