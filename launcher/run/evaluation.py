"""Loss and perplexity over a split, every token read once, spread over the ranks."""

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.data import IGNORED_TARGET, EvaluationBatches, Split
from launcher.measure.records import EvalRecord
from launcher.parallel.mesh import Mesh
from launcher.parallel.world import World
from launcher.run.steps import MOST_LOSS, REMEDY
from launcher.util.errors import Failure

TEST_SEQUENCES = 8
"""Sequences of one batch of `--test-batches`."""
VALIDATION_SEQUENCES = 256
"""Sequences of one point of the validation curve, for any number of ranks and batch size, so that
curves of two runs can be compared."""


def evaluate(
    loss_of: Callable[..., Tensor],
    split: Split,
    world: World,
    *,
    mesh: Mesh,
    name: str,
    step: int,
    seq_len: int,
    batch: int,
    max_sequences: int | None = None,
    metered: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ends_after: Callable[[int], bool] = lambda batch: False,
) -> EvalRecord:
    """Return the mean loss per counted target of `split`, over all ranks.

    Args:
        loss_of: `evaluate` of an engine.
        max_sequences: read only that many, over all ranks.
        metered: opens the context in which the batches are read.
        ends_after: called by all ranks after each batch; True ends the evaluation there.
    """
    started = time.perf_counter()
    batches = EvaluationBatches(
        split,
        seq_len=seq_len,
        batch=batch,
        rank=mesh.data_rank,
        world_size=mesh.data_ranks,
        positions=mesh.positions(seq_len),
        sequences=max_sequences,
    )
    total = len(batches)  # counts all windows
    # Sums run into the tens of millions: fp32 would drop digits.
    sums = torch.zeros(2, dtype=torch.float64)
    with metered():
        for done, arrays in enumerate(batches, start=1):
            count = int((arrays[1] != IGNORED_TARGET).sum())
            loss = float(loss_of(*(torch.from_numpy(a).to(world.device) for a in arrays)))
            if count:  # a batch of padding alone has no mean
                sums += torch.tensor([loss * count, count], dtype=torch.float64)
            progress(done, total)
            if done < total and ends_after(done):
                break
    if world.size > 1:
        dist.all_reduce(sums)
        sums /= mesh.loss_copies  # tensor-parallel ranks have summed the same losses
    loss_sum, tokens_read = sums.tolist()
    mean = loss_sum / tokens_read
    return EvalRecord(
        step=step,
        split=name,
        loss=mean,
        perplexity=math.exp(min(mean, MOST_LOSS)),
        tokens=int(tokens_read),
        duration_s=time.perf_counter() - started,
    )


def refuse_diverged(test: EvalRecord) -> None:
    """Fail a run whose test loss is not finite, or too large for a perplexity.

    Raises:
        Failure: always then.
    """
    if not test.loss < MOST_LOSS:
        raise Failure(
            f"training has diverged: after step {test.step} the test loss is {test.loss:.4g}: "
            f"{REMEDY}"
        )
