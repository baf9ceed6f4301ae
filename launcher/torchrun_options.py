"""torchrun's options for a training run, parsed by torch and rejected in one sentence."""

import contextlib
import copy
import importlib.util
import io
import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.util.errors import UserError, naming
from launcher.util.files import check_writable
from launcher.util.flags import MOST_RANKS, usable_path
from launcher.util.startup import require_own_package

LONGEST_INTERVAL_S = 3600
OUR_MODULE = "launcher.train"


def is_ours(program: Sequence[str]) -> bool:
    """Return True for `-m launcher.train`.

    Raises:
        UserError: another module of our package, which is not there or starts no ranks.
    """
    if not program or program[0] not in ("-m", "--module"):
        return False
    name = program[-1]
    if name == "launcher" and _is_our_package():
        raise UserError(f"-m {name}: its verbs start no ranks; give -m {OUR_MODULE} and its flags")
    if name.startswith("launcher.") and not _is_there(name):
        raise UserError(f"-m {name}: there is no such module; did you mean -m {OUR_MODULE}?")
    return name == OUR_MODULE


def _is_our_package() -> bool:
    try:
        require_own_package()
    except UserError:  # a package of the user's own, of the same name
        return False
    return True


def _is_there(name: str) -> bool:
    try:
        return not _is_our_package() or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # below what is no package
        return False


def read_options(argv: Sequence[str]) -> Any:
    """Parse `argv` as `torch.distributed.run` does.

    Raises:
        UserError: it would refuse a value, or fail with it once it has started.
    """
    run: Any = importlib.import_module("torch.distributed.run")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = run.parse_args(argv)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        reason = said.getvalue().strip().rpartition("error: ")[2].removeprefix("argument ")
        reason = re.sub(r"/--\w+:", ":", reason)  # the same name with underscores
        raise UserError(f"torchrun {reason}; see torchrun --help") from None
    nproc = args.nproc_per_node
    with _refusing(f"--nproc {nproc}"):
        ranks = run.determine_local_world_size(nproc)
    _require(1 <= ranks <= MOST_RANKS, f"--nproc {nproc}", f"a number from 1 to {MOST_RANKS}")
    restarts, interval_s = args.max_restarts, args.monitor_interval
    _require(restarts >= 0, f"--max-restarts {restarts}", "0 or more")
    _require(
        0 < interval_s <= LONGEST_INTERVAL_S,
        f"--monitor-interval {interval_s}",
        f"more than 0 seconds and at most {LONGEST_INTERVAL_S}",
    )
    # torch logs a warning for an unknown name, and starts without the handler
    for name in args.signals_to_handle.split(","):
        _require(name in signal.Signals.__members__, f"--signals-to-handle {name}", "SIGTERM,...")
    _check_rendezvous(args)
    if args.log_dir is not None:
        with naming("--log-dir"):
            folder = usable_path(args.log_dir)
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder}: is a file, choose another place")
            check_writable(folder)
    rest = copy.copy(args)
    rest.log_dir = os.devnull  # or torch makes the folder
    logging.disable(logging.WARNING)  # torch says them when it starts
    try:
        with _refusing("torchrun"):
            run.config_from_args(rest)
    finally:
        logging.disable(logging.NOTSET)
    return args


def _check_rendezvous(args: Any) -> None:
    """Check the number of nodes and their rendezvous."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry, utils

    match = re.fullmatch("([0-9]{1,5})(?::([0-9]{1,5}))?", args.nnodes)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    _require(1 <= fewest <= most, f"--nnodes {args.nnodes}", "N or MIN:MAX, from 1 on")
    _require(0 <= args.node_rank < most, f"--node-rank {args.node_rank}", f"below --nnodes {most}")
    if args.standalone and most > 1:
        raise UserError(
            f"--standalone is for one node, but --nnodes is {args.nnodes}: give their rendezvous "
            "with --rdzv-backend c10d and --rdzv-endpoint HOST:PORT"
        )
    known = list(rendezvous_handler_registry._registry)
    _require(
        args.rdzv_backend in known,
        f"--rdzv-backend {args.rdzv_backend}",
        "one of " + ", ".join(known),
    )
    port = args.master_port
    _require(port is None or 0 <= port < 2**16, f"--master-port {port}", "from 0 to 65535")
    with _refusing(f"--rdzv-endpoint {args.rdzv_endpoint}"):
        utils.parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)


def _require(fulfilled: bool, given: str, expected: str) -> None:
    if not fulfilled:
        raise UserError(f"{given} must be {expected}")


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn any error of torch about a value into one sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{what}: {reason}; see torchrun --help") from None
