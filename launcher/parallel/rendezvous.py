"""Rendezvous of ranks, and of the agents of several nodes, at an address that only those can reach.

torch's stores listen on all interfaces. Ours listen at the address given to the others: the
loopback on one node, this node's own on several.
"""

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from launcher.util.errors import WHY, UserError, refused

BACKEND = "shardscale"  # by this name torch's agent finds our rendezvous
LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that come all at once
WITHOUT_ID = "none"  # torch's own --rdzv-id, where none is given
DEFAULT_PORT = 29400  # torch's own, of an --rdzv-endpoint without one


def listening_store(host: str, port: int, *, nodes: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens at `host`, at any free port where `port` is 0.

    Raises:
        UserError: the port is in use.
    """
    listener = _listen(host, port, nodes=nodes)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # else closed with `listener`
        timeout=timeout,
    )


def endpoint_of(text: str) -> tuple[str, int]:
    """`node1:29400` -> its parts."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    with refused(ValueError, f"--rdzv-endpoint {text}: {WHY}"):
        host, port = parse_rendezvous_endpoint(text, default_port=DEFAULT_PORT)
    return host, port


def require_free(host: str, port: int) -> None:
    """Raises UserError where the port is in use."""
    _listen(host, port, nodes=1).close()


def _listen(host: str, port: int, *, nodes: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UserError(f"port {port} of the rendezvous must be 0 to {(1 << 16) - 1}")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    # A node's name may mean the loopback on that node alone (Debian's /etc/hosts).
    if nodes > 1 and ipaddress.ip_address(address[0]).is_loopback:
        family, address = socket.AF_INET, ("", port)
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} of {host}, for the rendezvous of the ranks, is in use: give another "
                "--master-port (MASTER_PORT), or none for a free one"
            ) from None
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), backlog=BACKLOG)  # behind another's address


def store_of_ranks(rank: int, size: int, *, nodes: int, timeout: timedelta) -> Store:
    """Make the store for `init_process_group`, as torch would from the environment.

    Raises:
        UserError: MASTER_PORT is in use.
    """
    if size == 1:
        return listening_store(LOOPBACK, 0, nodes=1, timeout=timeout)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # The agent's store outlives restarts: a new attempt must not find keys of the last.
        return PrefixStore(f"/worker/attempt_{life}", store)
    if rank == 0:
        return listening_store(host, port, nodes=nodes, timeout=timeout)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def stay_on_this_node() -> None:
    """Have gloo and NCCL connect over the loopback, unless the user has chosen an interface."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):  # else they choose, as torch leaves it to them
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def offer_rendezvous() -> None:
    """Let torch's agent find ours under the name BACKEND: c10d's own, with stores of ours."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    class Backend(C10dRendezvousBackend):
        name = BACKEND  # torch compares it with the name asked for

    host, port = endpoint_of(parameters.endpoint)
    nodes: int = parameters.max_nodes
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout", 60))
    is_host = parameters.get_as_bool("is_host")
    listens = nodes == 1 or (_matches_machine_hostname(host) if is_host is None else is_host)
    # Of several agents of one job on this machine the first one listens. Without an id, which
    # tells jobs apart, another job may hold the port.
    joins = listens and nodes > 1 and is_host is None and parameters.run_id != WITHOUT_ID
    try:
        store = listening_store(host, port, nodes=nodes, timeout=timeout) if listens else None
    except UserError as error:
        if not joins:
            hint = "; to join agents of this job there, give each the same --rdzv-id"
            raise UserError(f"{error}{hint if nodes > 1 else ''}") from None
        store = None
    store = store or TCPStore(host, port, is_master=False, timeout=timeout)
    handler: Any = create_handler(store, Backend(store, parameters.run_id), parameters)
    # The one for ranks, which would listen on all interfaces, too.
    handler._create_tcp_store_server = lambda address, port: listening_store(
        address, port, nodes=nodes, timeout=timeout
    )
    return handler
