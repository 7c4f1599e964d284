"""The sockets of a publisher: what strangers send to them stays nowhere."""

import asyncio
import os
import socket

from kvrouter_store.events.publisher import EventSockets

RUBBISH = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"x" * (4 << 20)
"""The beginning of HTTP/2, which ZMQ takes for a peer of long ago, and messages of 120 bytes."""


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_peer_that_says_much_and_leaves_is_noticed_although_nothing_is_published() -> None:
    sockets = EventSockets("tcp://127.0.0.1:*")
    try:
        before = files()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", sockets.ports[0])) as stranger:
                await asyncio.to_thread(stranger.sendall, RUBBISH)
        async with asyncio.timeout(10):
            while files() > before:
                await asyncio.sleep(0.01)
    finally:
        sockets.close()
