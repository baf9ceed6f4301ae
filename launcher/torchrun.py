"""torch's torchrun with `--nproc`, and checks and reports for our own runs.

As shipped, `torchrun --nproc 4` is refused as ambiguous (`--nproc-per-node`, `--nproc_per_node`).
Programs other than `launcher.train` run exactly as under torch's own.
"""

import importlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from launcher.util.errors import ExitCode, Failure, UserError, refusing, tell
from launcher.util.processes import signal_name, usable_cores
from launcher.util.startup import (
    hears,
    importing,
    interruptible,
    leave_with,
    outlive_readers,
    reader_may_leave,
    require_own_package,
)

with importing():
    from launcher.measure.host_memory import Kills
    from launcher.parallel import rendezvous
    from launcher.parallel.world import OWN_AGENT
    from launcher.run.agent_signals import LEFT_TO_TORCH, AgentSignals
    from launcher.run.agreement import STOP_SIGNALS
    from launcher.run.other_nodes import run_agent
    from launcher.run.resume import has_our_run
    from launcher.run.run_folder import RunFolder, release_run_folder, reserve_run_folder
    from launcher.torchrun_options import is_ours, read_options
    from launcher.util.processes import for_children

WITHOUT_VALUE = frozenset({"--standalone", "--virtual-local-rank", "--virtual_local_rank"})
BEFORE_PROGRAM = frozenset({"-m", "--module", "--no-python", "--no_python", "--run-path"})
SAYS_WHERE_TO_MEET = ("--nnodes", "--rdzv", "--master", "--standalone", "--node")


@refusing
def main(argv: Sequence[str] | None = None) -> int:
    """Run the `torchrun` console script or `python -m launcher run`; return an exit code."""
    argv = sys.argv[1:] if argv is None else argv
    run: Any = importlib.import_module("torch.distributed.run")
    own, program, program_args = split_command(argv)
    if {"-h", "--help"} & set(own):
        with reader_may_leave():
            _print_help(run)
        return ExitCode.DONE
    if not any(token.startswith(SAYS_WHERE_TO_MEET) for token in own):
        own.insert(0, "--standalone")  # a free port, so that two runs never meet on 29500
    if ours := is_ours(program):
        args = read_options([*own, *program])
    else:
        args = run.parse_args([*own, *program])
    # Set here rather than parsed: torchrun refuses a program's flag that happens to be an
    # ambiguous prefix of its own (`--start`).
    args.training_script_args = program_args
    ranks_per_node: int = run.determine_local_world_size(args.nproc_per_node)
    # torch would warn, and give each rank one thread
    if ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks_per_node))
    if ours:
        with interruptible():
            return _run_training(run, args, ranks_per_node)
    if hears(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as under torch's own
    from torch.distributed.elastic.multiprocessing.errors import record

    record(run.run)(args)
    return ExitCode.DONE


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split arguments into torchrun's options (`--nproc` spelled out), program and arguments."""
    own: list[str] = []
    tokens = list(argv)
    while tokens and tokens[0].startswith("-") and tokens[0] not in BEFORE_PROGRAM:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        own.append("--nproc-per-node" + equals + value if name == "--nproc" else token)
        if not equals and token not in WITHOUT_VALUE and tokens:
            own.append(tokens.pop(0))
    program: list[str] = []
    while tokens:
        program.append(tokens.pop(0))
        if not program[-1].startswith("-"):
            break
    return own, program, tokens


def _print_help(run: Any) -> None:
    parser = run.get_args_parser()
    parser.prog = "torchrun"
    parser.epilog = (
        "Of shardscale's own: --nproc N is --nproc-per-node N, and -m launcher.train is checked "
        "before ranks start. Flags of the training: shardscale train --help"
    )
    for action in parser._actions:
        if action.dest == "nproc_per_node":
            action.option_strings = ["--nproc", *action.option_strings]
    parser.print_help()


def _run_training(run: Any, args: Any, ranks_per_node: int) -> int:
    """Check a training run, start it, and return its own exit code.

    Raises:
        UserError: whatever the user can fix.
    """
    from launcher.forecast.trials import Stopped

    outlive_readers()
    folder: Path | None = None
    fewest, _, most = args.nnodes.partition(":")  # torchrun's default is 1:1
    # Else only the rendezvous of the nodes tells how many there are.
    nodes = int(fewest) if most in ("", fewest) else None
    os.environ |= {OWN_AGENT: fewest if nodes else args.nnodes} | for_children()
    try:
        require_own_package()
        _arrange_rendezvous(args, nodes)
        if nodes is not None:
            folder = _prepare_folder(args, nodes, ranks_per_node)
    except Stopped as stopped:
        tell(stopped)
        return stopped.exit_code
    return _supervise(run, args, folder)


def _prepare_folder(args: Any, nodes: int, ranks_per_node: int) -> Path | None:
    """Check the run and return its folder, choosing a name if none is given.

    Where the arguments leave the micro-batch open, it is found or planned now, once, and written
    into them, so that all ranks have the same.

    Raises:
        UserError: whatever the user can fix.
        Stopped: a signal has ended the search for a micro-batch.
    """
    from launcher.config.schema import AutoMicroBatch
    from launcher.forecast.micro_batch import find_micro_batch, plan_micro_batch
    from launcher.run.prepare import prepare
    from launcher.train import load_forecast

    check = partial(
        prepare,
        world_size=nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        load_forecast=load_forecast,
    )
    prepared = check(args.training_script_args)
    if isinstance(prepared.resolved.config.data.micro_batch, AutoMicroBatch):
        if nodes > 1:
            raise UserError(
                f"--micro-batch auto tries sizes on one node, but there are {nodes}: give the "
                "number that it finds on one of them"
            )
        args.training_script_args = find_micro_batch(
            args.training_script_args, prepared, ranks=ranks_per_node
        )
        prepared = check(args.training_script_args)
    elif prepared.micro_batch_open and nodes == 1:
        args.training_script_args = plan_micro_batch(
            args.training_script_args, ranks=ranks_per_node
        )
        prepared = check(args.training_script_args)
    folder: Path | None = prepared.resolved.config.loop.out
    if folder is None and nodes > 1 and args.max_restarts > 0:
        raise UserError(
            f"--max-restarts {args.max_restarts} on {nodes} nodes: name the run folder with --out, "
            "so that restarted ranks find it"
        )
    if folder is None and nodes == 1:
        folder = reserve_run_folder(prepared.resolved)
        args.training_script_args += ["--out", str(folder)]
    return folder


def _supervise(run: Any, args: Any, folder: Path | None) -> int:
    """Start the ranks, wait for their end, and report it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from launcher.util.files import scratch_folder

    # The worker that failed first has printed its own traceback; theirs would only bury it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    if args.max_restarts > 0 or ":" in os.environ[OWN_AGENT]:
        # The store that agents share by default outlives a restart, and ranks that read in it the
        # addresses of the dead ones fail to connect.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    args.signals_to_handle = LEFT_TO_TORCH  # else torch's handlers replace those of `stop`
    with scratch_folder("agent") as scratch:
        args.log_dir = args.log_dir or str(scratch)  # torch never removes a folder of its own
        kills, stop = Kills.read(), AgentSignals(folder, scratch)
        stop.install()
        try:
            run_agent(run, args)
        except ChildFailedError as error:
            with stop.tells:
                return _how_ranks_failed(error, folder, stop, kills)
        except Failure as error:
            return _how_it_ended(folder, str(error), None, certain=False)
        except SignalException as error:
            return _how_it_ended(folder, f"stopped by {error.sigval.name}", None, certain=False)
        finally:
            stop.close()
            if folder is not None:
                release_run_folder(folder)
    with stop.tells:
        stopped_code = stop.settle()
    if stopped_code is not None:
        return stopped_code
    return int(_reported(folder).get("exit_code") or ExitCode.DONE)  # preempted ranks end with 0


def _reported(folder: Path | None) -> dict[str, Any]:
    """Return what ranks have written to status.json."""
    return {} if folder is None else RunFolder(folder).read_status()


def _arrange_rendezvous(args: Any, nodes: int | None) -> None:
    """Replace torch's rendezvous, which listens on all interfaces, by our own.

    Raises:
        UserError: the port that is asked for is in use.
    """
    if args.rdzv_backend == "static" and nodes != 1:
        if args.master_port is not None and args.node_rank == 0:
            rendezvous.require_free(args.master_addr, args.master_port)
        return
    if args.rdzv_backend not in ("static", "c10d") or "store_type" in args.rdzv_conf:
        return
    if nodes == 1:  # no other node needs to reach it, whatever its name
        # Below torch 2.13 --master-port is 29500 where none is given.
        port = 0 if args.standalone else args.master_port or 0
        if args.rdzv_endpoint:
            _, port = rendezvous.endpoint_of(args.rdzv_endpoint)
        rendezvous.require_free(rendezvous.LOOPBACK, port)
        args.rdzv_endpoint, args.rdzv_id = f"{rendezvous.LOOPBACK}:{port}", str(uuid.uuid4())
        args.local_addr = rendezvous.LOOPBACK
    args.standalone, args.rdzv_backend = False, rendezvous.BACKEND
    rendezvous.offer_rendezvous()


def _how_ranks_failed(error: Any, folder: Path | None, stop: AgentSignals, kills: Kills) -> int:
    # A killed rank is the cause, even if another ends first: others notice and can still report.
    asked = STOP_SIGNALS if stop.stop_signal else ()  # which ends a rank that does not listen yet
    killed = [
        (rank, failure)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and -failure.exitcode not in asked
    ]
    if "ranks_of_this_node" in _reported(folder).get("detail", {}):
        killed = []  # after a time-out in a collective: by torch's agent, as it did not end itself
    rank, failure = killed[0] if killed else error.get_first_failure()
    if failure.exitcode == ExitCode.REFUSED:
        return ExitCode.REFUSED  # it has said why; the folder may be another run's
    stopped_code = None if killed else stop.settle()
    if stopped_code is not None:
        return stopped_code
    how = f"ended with exit code {failure.exitcode}"
    if killed:
        number = -failure.exitcode
        likely = kills.likely_cause() if number == signal.SIGKILL else ""
        how = f"was killed by {signal_name(number)}{likely}"
    return _how_it_ended(folder, f"rank {rank} {how}", rank, certain=bool(killed))


def _how_it_ended(folder: Path | None, seen: str, rank: int | None, *, certain: bool) -> int:
    """Return the exit code of status.json; mark a run as failed whose ranks could not write it."""
    if folder is None or not has_our_run(folder):
        tell(seen)
        return ExitCode.FAILED
    reported = RunFolder(folder).read_status()
    status = RunFolder(folder).settle(seen, rank, certain=certain)
    if (certain or reported.get("state") == "running") and status["reason"] == seen:
        tell(seen)  # no rank could say so itself
    return int(status["exit_code"])


def command() -> NoReturn:
    """Run as a process of its own."""
    leave_with(main())


if __name__ == "__main__":
    command()
