"""Ports of the demo's processes: chosen first, listened on later."""

import socket
from pathlib import Path

from kvrouter.demo.cluster import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_can_be_listened_on_and_is_given_to_no_connection() -> None:
    first_given = int(RANGE.read_text().split()[0])
    port = free_port()
    assert port < max(first_given, 32_768)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        assert free_port() != port
