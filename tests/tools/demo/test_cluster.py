"""Ports of the demo's processes: chosen first, listened on later."""

import random
import socket
from pathlib import Path

import pytest

from kvrouter.tools.demo.children import ChildFailed, free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_is_given_to_no_connection() -> None:
    first_given = int(RANGE.read_text().split()[0])
    if first_given < 32_768:
        pytest.skip(f"ports from {first_given} on are given: run with ip_local_port_range 32768")
    assert all(free_port() < first_given for _ in range(20))


def test_a_port_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    other = free_port()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        taken = listening.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda *_: [taken, other])
        assert free_port() == other
        monkeypatch.setattr(random, "sample", lambda *_: [taken])
        with pytest.raises(ChildFailed, match="no port"):
            free_port()
