"""Let a program on the null GPU pass where its libraries would need a real one.

distributed.py: collectives whose sums are read on the host, and a world of one rank.
built.py: operators that a library compiles with nvcc. weights.py: random values of large tensors
of the host. generation.py: the end of transformers' generate(). patience.py: callbacks that would
stop a training early. recurrent.py: LSTM and GRU without cuDNN. constants.py: numbers in code that
torch.compile makes. masks.py: padding of batches. detection.py: boxes that detectors sample. Must
work with Python 3.9 and torch 2.4, so annotations stay text.
"""

from __future__ import annotations

import ctypes
import os

from shardscale_after import after_import


def begin() -> None:
    """Arrange for each library to be prepared after its import, where the null GPU is loaded."""
    if not hasattr(ctypes.CDLL(None), "shardscale_follow"):
        return
    only = os.environ.get("SHARDSCALE_NULL_GPU_RANK")
    if None not in (only, os.environ.get("RANK")) and only != os.environ["RANK"]:
        os._exit(0)  # one rank runs alone, and this is another
    from shardscale_rehearsal import (
        built,
        constants,
        detection,
        distributed,
        generation,
        images,
        masks,
        patience,
        recurrent,
        weights,
    )

    after_import(detection.SAMPLER, detection.prepare_sampler)
    after_import(detection.PROPOSALS, detection.prepare_proposals)
    after_import(detection.HEADS, detection.prepare_heads)
    after_import(distributed.MODULE, distributed.prepare)
    for module in distributed.METHODS:
        after_import(module, distributed.prepare_methods)
    after_import(built.MODULE, built.prepare)
    after_import(constants.MODULE, constants.prepare)
    after_import(generation.MODULE, generation.prepare)
    after_import(images.MODULE, images.prepare)
    after_import(masks.MODULE, masks.prepare)
    after_import(weights.MODULE, weights.prepare)
    after_import(recurrent.MODULE, recurrent.prepare)
    after_import(patience.TRANSFORMERS, patience.prepare_transformers)
    for module in patience.LIGHTNING:
        after_import(module, patience.prepare_lightning)
