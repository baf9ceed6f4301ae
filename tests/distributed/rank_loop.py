"""What ranks of tests have in common: the loop of `launcher.train` without its records."""

import gc

import torch
import torch.distributed as dist

from launcher.config.resolve import Resolved
from launcher.data import Corpus, GlobalBatches
from launcher.optim.schedule import learning_rate
from launcher.parallel.mesh import Mesh
from launcher.parallel.world import World
from launcher.strategies.engine import Engine, train_step
from launcher.strategies.zero.engine import import_deepspeed
from launcher.train import to_device


def freeze_imports() -> None:
    """Import what is large, so that it is never looked through for what a case can drop: that
    would take longer than most cases."""
    import_deepspeed(torch.device("cpu"))


def steps(
    resolved: Resolved, corpus: Corpus, world: World, engine: Engine, numbers: range
) -> tuple[list[float], list[float]]:
    """Losses (mean over the global batch) and gradient norms of the numbered steps;
    a norm that is not finite is a step that was skipped."""
    config = resolved.config
    batches = GlobalBatches(
        corpus.train,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        seed=config.loop.seed,
    )
    mesh = Mesh.of(world, config.sharding)
    positions = mesh.positions(resolved.seq_len)
    losses, norms = [], []
    for step in numbers:
        lr = learning_rate(step, config.optim, resolved.steps)
        mine = batches.rank_slice(step - 1, rank=mesh.data_rank, world_size=mesh.data_ranks)
        micro_batch = config.data.micro_batch
        micro_batches = to_device(mine, micro_batch, world.device, positions)
        weights = batches.weights(step - 1, mine, micro_batch=micro_batch, positions=positions)
        assert len(micro_batches) == resolved.accumulation
        loss, result = train_step(engine, micro_batches, lr, weights=weights)
        losses.append(loss)
        norms.append(float(result.grad_norm))
    mean = torch.stack(losses)
    if world.size > 1:
        dist.all_reduce(mean)
    return (mean / world.size).tolist(), norms


def release(engine: object) -> None:
    """Drop DeepSpeed's hooks and buffers, which hold the model in cycles."""
    engine = getattr(engine, "inner", engine)  # with masks around it
    deepspeed_engine = getattr(engine, "_engine", None)
    if deepspeed_engine is not None:
        deepspeed_engine.destroy()
        from deepspeed.utils import groups

        groups.mpu = None  # which the next engine would ask, if it has none of its own
    gc.collect()
