"""Instruments: phases of a step, memory and its ledger, NVML, the sampler.

records.py is the schema of all that is written. What cannot be measured is None. Knows nothing of
predictions.
"""
