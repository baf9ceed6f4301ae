"""Work of a rank's forward and backward over one micro-batch, read off the recorded trace."""

from typing import Any

from launcher.config.resolve import Resolved
from launcher.forecast.trace.asked import asked_of
from launcher.forecast.trace.blocks import micro_batch_work, pass_work
from launcher.forecast.trace.events import Place
from launcher.forecast.trace.work import Work
from launcher.parallel.mesh import Mesh


def passes_work(resolved: Resolved) -> tuple[Work, Work]:
    """Work of a micro-batch forward, and backward with what is recomputed.

    A chunked loss computes its gradients in the forward (model/loss.py).
    """
    return pass_work(**_asked(resolved))


def block_flops(resolved: Resolved) -> list[float]:
    """FLOPs of each block's backward, recomputation included."""
    works = micro_batch_work(**_asked(resolved))
    backward = [works[Place("block_backward", n)] for n in range(resolved.model.layers)]
    return [work.matmul_flops + work.attention_flops for work in backward]


def _asked(resolved: Resolved) -> dict[str, Any]:
    """Ask for the rank with the last part of a sequence and of the matrices, as `predict` does."""
    sharding = resolved.config.sharding
    ranks = sharding.context_parallel * sharding.tensor_parallel
    mesh = Mesh.at(ranks - 1, ranks, sharding)
    return asked_of(resolved, mesh, device_type=resolved.config.loop.device)
