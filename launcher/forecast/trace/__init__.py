"""The decoder run once without memory: what its operators allocate, keep and compute.

record.py records it, template.py and micro_batches.py make one recording serve for any micro-batch,
stored.py has those of our own decoders, of any dimensions.
"""
