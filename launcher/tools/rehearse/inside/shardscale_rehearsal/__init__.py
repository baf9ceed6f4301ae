"""Let a program on the null GPU pass where its libraries would need a real one.

Must work with Python 3.9 and torch 2.4, so annotations stay text.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import Any

from shardscale_after import after_import

from shardscale_rehearsal.distributed import METHODS
from shardscale_rehearsal.following import FUNCTIONS

PREPARED = {
    # collectives whose sums are read on the host, and a world of one rank
    "torch.distributed.distributed_c10d": "distributed.prepare",
    **dict.fromkeys(METHODS, "distributed.prepare_methods"),
    # operators that a library compiles with nvcc
    "deepspeed.ops.op_builder": "built.prepare",
    # random values of large tensors of the host
    "torch.nn.init": "weights.prepare",
    # LSTM and GRU without cuDNN
    "torch.nn.modules.rnn": "recurrent.prepare",
    # numbers in code that torch.compile makes
    "torch._inductor.fx_passes.joint_graph": "constants.prepare",
    # the end of transformers' generate()
    "transformers.generation.stopping_criteria": "generation.prepare",
    # callbacks that would stop a training early
    "transformers.trainer_callback": "patience.prepare_transformers",
    "lightning.pytorch.callbacks.early_stopping": "patience.prepare_lightning",
    "pytorch_lightning.callbacks.early_stopping": "patience.prepare_lightning",
    # sizes of images, padding of batches, boxes that detectors sample
    "transformers.modeling_utils": "images.prepare",
    "torchvision.models.detection._utils": "detection.prepare_sampler",
    "torchvision.models.detection.roi_heads": "detection.prepare_heads",
    **dict.fromkeys(FUNCTIONS, "following.prepare"),
}
"""Module of a library -> our function that prepares it right after its import, and is itself
imported by then."""


def begin() -> None:
    """Arrange for each library to be prepared after its import, where the null GPU is loaded."""
    if not hasattr(ctypes.CDLL(None), "shardscale_follow"):
        return
    only = os.environ.get("SHARDSCALE_NULL_GPU_RANK")
    if None not in (only, os.environ.get("RANK")) and only != os.environ["RANK"]:
        os._exit(0)  # one rank runs alone, and this is another
    for name, function in PREPARED.items():
        after_import(name, functools.partial(_prepare, function))


def _prepare(function: str, module: Any) -> None:
    ours, _, name = function.partition(".")
    getattr(importlib.import_module(f"{__name__}.{ours}"), name)(module)
