"""The rendezvous of ranks on one node."""

import os
import socket
from unittest import mock

import pytest

from launcher.parallel.rendezvous import stay_on_this_node


@pytest.mark.parametrize(
    ("interfaces", "expected"), [(["eth0", "lo"], "lo"), (["eth0"], None), ([], None)]
)
def test_ranks_of_one_node_meet_over_its_loopback_where_it_has_one(
    interfaces: list[str], expected: str | None
) -> None:
    indexed = list(enumerate(interfaces, 1))
    with (
        mock.patch.dict(os.environ, clear=True),
        mock.patch.object(socket, "if_nameindex", return_value=indexed),
    ):
        stay_on_this_node()
        for library in ("GLOO", "NCCL"):
            assert os.environ.get(f"{library}_SOCKET_IFNAME") == expected
