"""What an agent says about other nodes that do not come, which torch awaits for minutes in silence.

Without it, a node that was never started, a wrong address and a firewall all look like a hang.
"""

import ipaddress
import sys
import threading
from typing import Any

from launcher.run.agent_signals import running_ranks
from launcher.util.errors import Failure, one_line

SILENT_S = 15.0  # nodes of one job start within seconds of each other
LOOK_EVERY_S = 1.0


def run_with_others(run: Any, args: Any) -> None:
    """Run torch's agent, and say where it waits for other nodes while it has no ranks.

    Raises:
        Failure: the nodes did not meet, or have lost each other.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if args.nnodes in ("1", "1:1"):
        run.run(args)
        return
    ended, met = threading.Event(), threading.Event()
    threading.Thread(target=_say_when_alone, args=(args, ended, met), daemon=True).start()
    try:
        run.run(args)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        reason = one_line(str(error).partition("\n")[0] or "the time for it is over")
        if met.is_set():
            raise Failure(f"another node of --nnodes {args.nnodes} is gone ({reason})") from None
        raise Failure(f"{_meeting(args, 'did not meet')} ({reason})") from None
    finally:
        ended.set()


def _say_when_alone(args: Any, ended: threading.Event, met: threading.Event) -> None:
    """Say it once for each time that the agent has had no ranks for a while; `met` is set by its
    first ones."""
    alone_s = 0.0
    while not ended.wait(LOOK_EVERY_S):
        if has_ranks := bool(running_ranks()):
            met.set()
        if has_ranks and args.max_restarts == 0:
            return  # when they have ended, torch awaits the ends of the others
        alone_s = 0.0 if has_ranks else alone_s + LOOK_EVERY_S
        if SILENT_S <= alone_s < SILENT_S + LOOK_EVERY_S:
            print(f"shardscale: {_meeting(args, 'waits for')}", file=sys.stderr, flush=True)


def _meeting(args: Any, does: str) -> str:
    """Describe the meeting, and what to look at."""
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
