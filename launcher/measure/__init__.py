"""Measurement: phases of a step, memory and its ledger, NVML, the sampler, experiment loggers.

records.py is the schema of everything that is written; unmeasured values are None. This room knows
nothing of predictions.
"""

from typing import Final

PHASES: Final = ("data", "forward", "backward", "step")
"""Phases of a step."""
