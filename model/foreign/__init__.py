"""Decoders of transformers: any causal language model that it builds from a config.

config.py    its sizes as our ModelConfig; imports no torch
reading.py   a config.json is read, checked and measured without memory
head.py      what its head does to logits, found by asking it
decoder.py   the module, and its initial values
"""
