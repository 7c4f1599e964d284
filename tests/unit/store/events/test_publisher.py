"""The sockets of a publisher: what strangers send to them stays nowhere."""

import os
import socket
from contextlib import suppress

import pytest
import zmq
from tests.fakes.patience import until

from kvrouter_store.events.publisher import EventSockets
from kvrouter_store.events.sockets import Inbox, endpoint_of, open_context, open_socket

RUBBISH = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"x" * (4 << 20)
"""The beginning of HTTP/2, which ZMQ takes for a peer of long ago, and messages of 120 bytes."""


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_events_and_replays_reach_subscribers_by_ipv6() -> None:
    sockets, context = EventSockets("tcp://[::1]:*", "tcp://[::1]:*"), open_context()
    sockets.kept.append([b"topic", bytes(8), b"kept"])
    came: list[bytes] = []
    inboxes = []
    for kind, port in zip((zmq.SUB, zmq.DEALER), sockets.ports, strict=True):
        endpoint = endpoint_of("::1", port or 0)
        peer = open_socket(context, kind, endpoint)
        if kind == zmq.SUB:
            peer.setsockopt(zmq.SUBSCRIBE, b"")
        peer.connect(endpoint)
        if kind == zmq.DEALER:
            peer.send_multipart([b"", bytes(8)])
        inboxes.append(Inbox(peer, lambda frames: came.append(frames[-1])))

    def send() -> bool:
        sockets.send([b"topic", bytes(8), b"sent"])
        return {b"sent", b"kept"} <= {*came}

    try:
        await until(send)
    finally:
        for inbox in inboxes:
            inbox.close()
        context.destroy(linger=0)
        sockets.close()


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
