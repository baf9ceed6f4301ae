"""Bytes and seconds of a run before it starts, and the search for the best one.

In: resolved configs and a GPU's data sheet or profile. Out: ledgers, verdicts, tables, and the
answers to a run's three questions (for_runs.py). Reads the core, is never imported by it, and needs
no GPU.
"""

from typing import Final

LARGEST_BATCH: Final = "largest-batch"
LARGEST_MODEL: Final = "largest-model"
GOALS: Final = ("fastest", "least-memory", LARGEST_BATCH, LARGEST_MODEL)
"""Rankings of a plan."""
