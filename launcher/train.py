"""One rank of a training: `torchrun --nproc 4 -m launcher.train --zero 2`, or without torchrun.

Build, loop, finish: the same code for every strategy, on CPUs and on GPUs.
"""

import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from launcher.config.arguments import print_help_if_asked
from launcher.util.startup import importing, interruptible, outlive_readers, require_own_package

if __name__ == "__main__":
    print_help_if_asked(sys.argv[1:])  # answers without importing torch
with importing():
    import numpy as np
    import torch
    from torch import Tensor

    from launcher.config.resolve import Resolved
    from launcher.config.schema import AutoMicroBatch
    from launcher.data import GlobalBatches, Sequences
    from launcher.measure.records import EvalRecord
    from launcher.optim.choice import learning_rate
    from launcher.parallel.mesh import Mesh
    from launcher.parallel.model_parallel import ModelParallel
    from launcher.parallel.world import World, leave, ranks_from_environment, start
    from launcher.run.ending import ending, refuse
    from launcher.run.evaluation import TEST_SEQUENCES, evaluate
    from launcher.run.forecast_protocol import Forecast
    from launcher.run.held_out import HeldOut
    from launcher.run.prepare import Prepared, prepare
    from launcher.run.resume import ended_out_of_memory
    from launcher.run.session import Session
    from launcher.strategies import strategy_of
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine, train_step
    from launcher.util.errors import ExitCode, Failure, UserError, tell


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank; ends the process with an exit code of `ExitCode`."""
    outlive_readers()
    # NCCL aborts a timed-out collective; dump every thread's stack when it does.
    faulthandler.enable()
    argv = sys.argv[1:] if argv is None else argv
    # only until `ending` handles signals: once a step has begun, SIGINT saves the run
    with interruptible():
        prepared, world = _start(argv)
    with (
        ending(world, load_forecast) as run_ending,
        Session(prepared, world, run_ending.takes) as session,
    ):
        run_ending.watches(session)
        train(prepared, world, session)
    leave(session.exit_code, together=True)


def _start(argv: Sequence[str]) -> tuple[Prepared, World]:
    """Reject bad input, then join the other ranks."""
    try:
        world_size, ranks_per_node = ranks_from_environment()
    except UserError as error:
        refuse(error, by_all=True)  # rank 0 is unknown here, so every rank reports
    try:
        prepared = prepare(
            argv,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            load_forecast=load_forecast,
        )
    except UserError as error:
        refuse(error)
    config = prepared.resolved.config
    # A rank never plans its micro-batch: all ranks need the same one, from the agent.
    alone = "RANK" not in os.environ
    if isinstance(config.data.micro_batch, AutoMicroBatch) or (prepared.micro_batch_open and alone):
        _exec_with_micro_batch(argv, prepared)
    if ended_out_of_memory(config.loop.out, os.environ):
        # restarting would run out of memory again
        leave(ExitCode.OUT_OF_MEMORY, together=False)
    try:
        world = join(prepared)
    except (UserError, Failure) as error:
        refuse(error, by_all=True)
    if world.size > 1:
        from launcher.run.same_start import check_same_start

        try:
            check_same_start(prepared, world)
        except UserError as error:
            refuse(error)
    return prepared, world


def join(prepared: Prepared) -> World:
    """Join the other ranks of a run.

    Raises:
        UserError, Failure: as of `start`.
    """
    config = prepared.resolved.config
    return start(
        config.loop.device,
        timeout_s=config.loop.collective_timeout_s,
        needs_group=strategy_of(config).needs_group,
        expandable_segments=prepared.resolved.expandable_segments,
    )


def _exec_with_micro_batch(argv: Sequence[str], prepared: Prepared) -> NoReturn:
    """Replace this process by one with the micro-batch that `auto` found, or that is planned.

    A fresh process, because the search leaves memory behind that the run would miss.
    """
    from launcher.forecast.micro_batch import find_micro_batch, plan_micro_batch
    from launcher.forecast.trials import Stopped

    if "RANK" in os.environ:
        refuse(
            UserError(
                "--micro-batch auto is found before ranks start, by shardscale's own torchrun "
                "(shardscale run) on one node: give a number"
            )
        )
    try:
        require_own_package()
        if prepared.micro_batch_open:
            argv = plan_micro_batch(argv, ranks=1)
        else:
            argv = find_micro_batch(argv, prepared, ranks=1)
    except UserError as error:
        refuse(error)
    except Stopped as stopped:
        tell(stopped)
        leave(stopped.exit_code, together=False)
    os.execv(sys.executable, [sys.executable, "-m", "launcher.train", *argv])


def load_forecast() -> Forecast:
    """Import the forecast: most runs need it at their end, none before the first step."""
    from launcher.forecast import for_runs

    return for_runs


def train(prepared: Prepared, world: World, session: Session) -> None:
    """Train for the resolved number of steps, then read the test split."""
    measure = take_steps(prepared, world, session)
    batches = prepared.resolved.config.loop.test_batches
    test = None
    if batches != 0 and not session.agreement.preempted:
        session.begin_test()
        test = measure(
            prepared.corpus.test,
            name="test",
            step=session.step,
            max_sequences=None if batches == "all" else batches * TEST_SEQUENCES,
            progress=session.console.testing,
            ends_after=session.agreement.ends_test_after,
        )
        session.end_test()
    if session.agreement.preempted:
        session.finish_preempted()
    else:
        summary = session.finish(test)
        session.compare(summary, load_forecast)  # last: a run is complete without it


def take_steps(prepared: Prepared, world: World, session: Session) -> Callable[..., EvalRecord]:
    """Build and train. Returns the function that evaluates the trained weights on a split."""
    resolved, corpus = prepared.resolved, prepared.corpus
    data, loop = resolved.config.data, resolved.config.loop

    session.enter("build")
    engine = build_engine(resolved, world)
    # Dropout differs between ranks, weights do not. Some strategies draw random numbers while they
    # build: seeding afterwards makes dropout the same under all of them.
    torch.manual_seed(loop.seed + world.rank)
    # after the seed: a resume restores the generators of its checkpoint
    session.watch(engine)
    mesh = Mesh.at(world.rank, world.size, resolved.config.sharding)
    positions = mesh.positions(resolved.seq_len)
    batches = GlobalBatches(
        corpus.train,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        seed=loop.seed,
    )
    measure = partial(
        evaluate,
        engine.evaluate,
        world=world,
        mesh=mesh,
        seq_len=resolved.seq_len,
        batch=data.micro_batch,
        metered=partial(session.memory.apart, "evaluation", "forward"),
    )

    held_out = HeldOut(resolved, corpus, engine, session, measure=measure, device=world.device)
    held_out.begin()

    session.enter("train")
    looked = True
    for step in session.steps():
        with session.phase("data"):
            # steps count from 1, global batches from 0
            mine = batches.rank_slice(step - 1, rank=mesh.data_rank, world_size=mesh.data_ranks)
            micro_batches = to_device(mine, data.micro_batch, world.device, positions)
            weights = batches.weights(
                step - 1, mine, micro_batch=data.micro_batch, positions=positions
            )
        lr = learning_rate(step, resolved.config.optim, resolved.steps)
        loss, result = train_step(engine, micro_batches, lr, weights=weights, phase=session.phase)
        session.step_done(loss=loss, result=result, lr=lr)
        if looked := not session.agreement.preempted:
            held_out.after(step)
    if not looked:  # saved by now: a scheduler may leave no time for more
        held_out.after(session.step)
    return measure


def build_engine(resolved: Resolved, world: World) -> Engine:
    """Build the strategy's engine on this rank's device."""
    if resolved.config.optim.arithmetic.tf32_matmuls:
        torch.set_float32_matmul_precision("high")
    strategy = strategy_of(resolved.config)
    types = strategy.dtypes(resolved.config)
    mesh = Mesh.at(world.rank, world.size, resolved.config.sharding)
    engine = strategy.build(
        BuildInputs(
            resolved=resolved,
            world=world,
            types=types,
            model_parallel=ModelParallel.join(mesh, world),
        )
    )
    if not resolved.model.masks:
        return engine
    from launcher.strategies.masks import MaskedEngine

    return MaskedEngine(engine)


def to_device(
    sequences: Sequences,
    micro_batch: int,
    device: torch.device,
    positions: "np.ndarray[Any, Any] | None" = None,
) -> list[tuple[Tensor, ...]]:
    """Move this rank's sequences to the device, as micro-batches.

    Each is (tokens, targets) of [micro_batch, T], and the starts of documents where attention needs
    them. With `positions`, only these of the T columns: this rank's under context parallelism.
    """

    def parts(array: "np.ndarray[Any, Any]") -> tuple[Tensor, ...]:
        rows = torch.from_numpy(array)
        if device.type == "cuda":
            # Only from page-locked memory does the copy run beside the host. torch's host allocator
            # reuses the block once the copy is done.
            rows = rows.pin_memory().to(device, non_blocking=True)
        return torch.split(rows, micro_batch)

    if positions is not None:
        return list(zip(*map(parts, sequences.at(positions)), strict=True))
    tokens = parts(sequences.tokens)
    columns = [[part[:, :-1].contiguous() for part in tokens]]
    if sequences.targets is None:
        columns.append([part[:, 1:].contiguous() for part in tokens])
    # given targets, then starts: the order of `Sequences`
    columns += [[*parts(array)] for array in sequences[1:] if array is not None]
    return list(zip(*columns, strict=True))


if __name__ == "__main__":
    main()
