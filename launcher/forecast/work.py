"""Work of a rank's forward and backward over one micro-batch, read off the recorded trace."""

import importlib
from collections.abc import Sequence

from launcher.config.resolve import Resolved
from launcher.forecast.trace.asked import asked_of
from launcher.forecast.trace.blocks import micro_batch_work, pass_work, shallow
from launcher.forecast.trace.events import Place, TraceRequest
from launcher.forecast.trace.stored import stored_template
from launcher.forecast.trace.work import Work
from launcher.parallel.mesh import Mesh
from launcher.util.startup import importing


def passes_work(resolved: Resolved) -> tuple[Work, Work]:
    """Work of a micro-batch forward, and backward with what is recomputed.

    A chunked loss computes its gradients in the forward (model/loss.py).
    """
    return pass_work(_asked(resolved))


def block_flops(resolved: Resolved) -> list[float]:
    """FLOPs of each block's backward, recomputation included."""
    works = micro_batch_work(_asked(resolved))
    backward = [works[Place("block_backward", n)] for n in range(resolved.model.layers)]
    return [work.matmul_flops + work.attention_flops for work in backward]


def import_for_recording(runs: Sequence[Resolved]) -> None:
    """Import what recording their traces imports, over a CPU second: once, before workers fork.

    FakeTensorMode imports `torch._dynamo`, whatever it records. Where most traces come with the
    package, it is left to a worker that needs another one.
    """
    if 2 * sum(map(_is_stored, runs)) > len(runs):
        return
    with importing():
        importlib.import_module("torch._dynamo")
        if any(run.config.loop.compiles for run in runs):
            importlib.import_module("torch._inductor.compile_fx")


def _is_stored(run: Resolved) -> bool:
    asked = _asked(run)
    few, *_ = shallow(asked.model)
    return stored_template(asked._replace(model=few)) is not None


def _asked(resolved: Resolved) -> TraceRequest:
    """Ask for the rank with the last part of a sequence and of the matrices, as `predict` does."""
    sharding = resolved.config.sharding
    ranks = sharding.context_parallel * sharding.tensor_parallel
    mesh = Mesh.at(ranks - 1, ranks, sharding)
    return asked_of(resolved, mesh, device_type=resolved.config.loop.device)
