"""What strangers do at open ports: python -m tests.faults.strangers ATTACK SECONDS DOOR...

A process of its own, so that what it does costs the measuring one nothing. A door is KIND:PORT, or
unix:PATH, where KIND says what is spoken there: http, https, kv, kvs, unix or zmq.
"""

import contextlib
import math
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvrouter_store import _core

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
PIECE = b"x" * 65536
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)  # ZMTP 3.0
PAUSE_S = 0.02
GRACE_S = 2.0
"""For the last piece; then the process ends, and with it its connections."""


class Door(NamedTuple):
    """Where something listens."""

    kind: str
    where: str

    def open(self) -> socket.socket:
        """A connection; with TLS where that is spoken."""
        if self.kind == "unix":
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(1)
            link.connect(self.where)
            return link
        link = socket.create_connection(("127.0.0.1", int(self.where)), timeout=1)
        if self.kind in ("https", "kvs"):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context.wrap_socket(link)
        return link

    @property
    def is_http(self) -> bool:
        return self.kind in ("http", "https")

    def request(self) -> bytes:
        """Something that the port understands and answers."""
        if self.is_http:
            return b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"
        return GREETING if self.kind == "zmq" else _core.encode_hello(1, name="stranger")


Attack = Callable[[Door, float], None]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def send(link: socket.socket, piece: bytes, times: int, end: float) -> None:
    """So many pieces, or as many as are taken."""
    with contextlib.suppress(OSError):
        for _ in range(times):
            if time.monotonic() > end:
                return
            link.sendall(piece)


def held(door: Door, count: int, sent: bytes) -> list[socket.socket]:
    """Connections that have said this much."""
    links = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            links.append(door.open())
            links[-1].sendall(sent)
    return links


def let_go(links: list[socket.socket]) -> None:
    for link in links:
        link.close()


def rest(end: float, most_s: float = PAUSE_S) -> None:
    """Do nothing for as long, but not beyond the end."""
    time.sleep(max(0.0, min(most_s, end - time.monotonic())))


def half(door: Door, end: float) -> None:
    """Requests that never become whole."""
    begun = HEAD if door.is_http else door.request()[:-1]
    links = held(door, 100, begun)
    links += held(door, 50, HEAD + b"Content-Length: 99\r\n\r\n{" if door.is_http else begun[:5])
    if door.kind in ("https", "kvs"):  # half a handshake
        links += held(Door("tcp", door.where), 50, b"\x16\x03\x01\x02\x00\x01")
    rest(end, math.inf)
    let_go(links)


def http2(door: Door, end: float) -> None:
    """HTTP/2's preface, and frames or anything else behind it."""
    settings, opened = frame(4, 0, 0, b""), frame(1, 4, 1, b"\x83\x84\x86\x41\x01x")
    bodies = (
        PIECE,
        frame(0, 0, 1, PIECE[:16384]) * 4,
        frame(6, 0, 0, b"12345678") * 3000,
        frame(9, 0, 1, b"\x00\x03abc\x03def" * 1000),
        frame(4, 0, 0, b"\x00\x03\x00\x00\x00\x64" * 2000),
        b"".join(frame(1, 4, k, b"\x83\x84\x86\x41\x01x") for k in range(1, 2001, 2)),
    )
    while time.monotonic() < end:
        for body in bodies:
            links = held(door, 5, PREFACE + settings + opened)
            for link in links:
                send(link, body, 80, end)
            let_go(links)
            rest(end)


def leave(door: Door, end: float) -> None:
    """Connect and leave, and connect and stay for a moment."""
    stay: list[socket.socket] = []
    while time.monotonic() < end:
        let_go(held(door, 20, b""))
        stay += held(door, 5, b"")
        if len(stay) > 300:
            let_go(stay)
            stay = []
        rest(end)
    let_go(stay)


def drip(door: Door, end: float) -> None:
    """Requests that come by a byte a second."""
    request, at = door.request(), 0
    links = held(door, 50, b"")
    while time.monotonic() < end:
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(request[at % len(request) :][:1])
        at += 1
        rest(end, 1.0)
    let_go(links)


def giant(door: Door, end: float) -> None:
    """Heads, bodies and frames larger than anything that is taken."""
    hello = bytearray(_core.encode_hello(1, name="x" * 30))
    sizes: tuple[bytes, ...] = (HEAD + b"X: ", HEAD + b"Content-Length: 99999999999\r\n\r\n")
    sizes += (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n", b"GET /")
    if door.kind == "zmq":
        sizes = (GREETING + b"\x04\x29\x05READY" + bytes(35), GREETING + b"\x02" + b"\x7f" * 8)
    elif not door.is_http:
        at = _core.HEADER_BYTES
        sizes = tuple(bytes(hello[:k]) + b"\xff" * (at - k) for k in (8, 12, 16, 20, 24))
    while time.monotonic() < end:
        for size in sizes:
            links = held(door, 3, size)
            for link in links:
                send(link, PIECE, 320, end)
            let_go(links)
            rest(end)


def unread(door: Door, end: float) -> None:
    """Requests whose answers nobody reads."""
    requests = door.request() * (2000 if door.is_http else 1)
    if door.kind in ("kv", "kvs", "unix"):
        requests += b"".join(_core.encode_stats(k) for k in range(2, 4000))
    links = []
    for _ in range(10):
        with contextlib.suppress(OSError):
            link = door.open()
            link.settimeout(0.2)
            links.append(link)
            send(link, requests, 20, end)
    rest(end, math.inf)
    let_go(links)


ATTACKS: dict[str, Attack] = {
    each.__name__: each for each in (half, http2, leave, drip, giant, unread)
}


def main(name: str, seconds: str, *doors: str) -> None:
    """One thread for each door. It is elsewhere in earnest, so it takes no processor from them."""
    os.nice(19)
    end = time.monotonic() + float(seconds)
    attack = ATTACKS[name]
    threads = [
        threading.Thread(target=partial(attack, Door(*door.split(":", 1)), end), daemon=True)
        for door in doors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + GRACE_S - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # with its threads, whatever they are in
