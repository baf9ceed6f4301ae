"""Measurement: phases of a step, memory and its ledger, NVML, the sampler, experiment loggers.

records.py is the schema of everything that is written; unmeasured values are None. This room knows
nothing of predictions.
"""
