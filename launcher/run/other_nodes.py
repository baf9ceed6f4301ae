"""Report nodes that do not join the rendezvous: torch waits for them for minutes without output.

A node that was never started, a wrong address and a firewall would all look like a hang.
"""

import ipaddress
import threading
from typing import Any

from launcher.run.agent_signals import running_ranks
from launcher.util.errors import Failure, one_line, tell

REPORT_AFTER_S = 15.0  # nodes of one job start within seconds of each other
CHECK_EVERY_S = 1.0


def run_agent(run: Any, args: Any) -> None:
    """Run torch's agent, and report once where it waits for other nodes.

    Raises:
        Failure: a node did not join the rendezvous, or left it.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if args.nnodes in ("1", "1:1"):
        run.run(args)
        return
    ended, joined = threading.Event(), threading.Event()
    threading.Thread(target=_report_waiting, args=(args, ended, joined), daemon=True).start()
    try:
        run.run(args)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = one_line(str(error).partition("\n")[0] or "timed out")
        if joined.is_set():
            raise Failure(f"another node of --nnodes {args.nnodes} is gone ({reason})") from None
        raise Failure(f"{_described(args, 'did not join')} ({reason})") from None
    finally:
        ended.set()


def _report_waiting(args: Any, ended: threading.Event, joined: threading.Event) -> None:
    """Print a line for each time that the agent has had no ranks for `REPORT_AFTER_S`; set
    `joined` when it first has ranks."""
    alone_s = 0.0
    while not ended.wait(CHECK_EVERY_S):
        if has_ranks := bool(running_ranks()):
            joined.set()
        if has_ranks and args.max_restarts == 0:
            return  # torch's exit barrier waits for other nodes' ranks, too
        alone_s = 0.0 if has_ranks else alone_s + CHECK_EVERY_S
        if REPORT_AFTER_S <= alone_s < REPORT_AFTER_S + CHECK_EVERY_S:
            tell(_described(args, "waits for"))


def _described(args: Any, does: str) -> str:
    """Name the endpoint of the rendezvous, and what to check."""
    if args.rdzv_backend == "static":
        # With an endpoint torch ignores the other two.
        place = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
        option = "--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr"
        which, check = f"node {args.node_rank}", f"{option} and a --node-rank of its own"
    else:
        place, option = args.rdzv_endpoint or "localhost", "--rdzv-endpoint"
        which, check = "this node", f"the same {option} and --rdzv-id"
    said = f"{which} {does} the other nodes of --nnodes {args.nnodes} at {place}"
    if _is_loopback(place):
        return f"{said}, which is this node alone: give {option} an address that all nodes reach"
    return f"{said}: start each with {check}, and let them reach that port"


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]") or place
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
