"""One portable checkpoint for every strategy: written by any, read by any, on any number of ranks.

A checkpoint is a folder `step-00000010`: one safetensors file per rank that wrote it, holding
pieces of flattened fp32 tensors, and `index.json` with their places and checksums.
"""

from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.document import DamagedCheckpoint
from launcher.checkpoint.index import Checkpoint
from launcher.checkpoint.saving import Saved, SaveError
from launcher.checkpoint.store import CheckpointFolder

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Checkpointer",
    "DamagedCheckpoint",
    "SaveError",
    "Saved",
]
