"""The sockets of a publisher: what strangers send to them stays nowhere."""

import os
import socket
from contextlib import suppress

import pytest
from tests.fakes.patience import until

from kvrouter_store.events.publisher import EventSockets

RUBBISH = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"x" * (4 << 20)
"""The beginning of HTTP/2, which ZMQ takes for a peer of long ago, and messages of 120 bytes."""


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("end", [0, 1])
async def test_peers_that_say_much_and_leave_are_noticed_although_nothing_is_published(
    end: int,
) -> None:
    sockets = EventSockets("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    port = sockets.ports[end]
    try:
        before = files()
        strangers = [socket.create_connection(("127.0.0.1", port or 0)) for _ in range(6)]
        for stranger in strangers:
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.sendall(RUBBISH)
        for stranger in strangers:
            stranger.close()
        await until(lambda: files() <= before)
    finally:
        sockets.close()
