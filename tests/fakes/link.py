"""A link between a client and a server that a test can stall, cut, or cut after so many bytes.

Forwards TCP and Unix sockets, descriptors (SCM_RIGHTS) included. Runs one thread of its own.
"""

import array
import contextlib
import selectors
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

Address = tuple[str, int] | str
CHUNK_BYTES = 1 << 16
MAX_FDS = 8


class Link:
    """`Link(target).start()` listens on `.address`, of the target's kind, and forwards both ways.

    `cut_after_up` / `cut_after_down`: how many bytes (client to server / server to client) pass
    before every connection of the link is closed; None: no limit. `refusals`: how many of the next
    connections are closed at once.
    """

    def __init__(self, target: Address, listen_path: Path | None = None) -> None:
        self.target = target
        self.cut_after_up: int | None = None
        self.cut_after_down: int | None = None
        self.refusals = 0
        self.passed_up = 0
        self.passed_down = 0
        self.stalled = threading.Event()
        self._listener = _listen(target, listen_path)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peer: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    @property
    def address(self) -> Address:
        """Where a client connects to."""
        name: Address = self._listener.getsockname()
        return name

    @property
    def url(self) -> str:
        """The address as a store URL."""
        address = self.address
        if isinstance(address, str):
            return f"kv+unix://{address}"
        return f"kv://{address[0]}:{address[1]}"

    @property
    def connections(self) -> int:
        """How many connections pass through now."""
        with self._lock:
            return len(self._peer) // 2

    def start(self) -> Self:
        """Begin to forward."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread.start()
        return self

    def stall(self) -> None:
        """Forward nothing more, but keep the connections open."""
        self.stalled.set()
        self._wake()

    def resume(self) -> None:
        """End a stall."""
        self.stalled.clear()
        self._wake()

    def cut(self) -> None:
        """Close every connection that passes through now; new ones are taken."""
        with self._lock:
            for one in list(self._peer):
                self._drop(one)

    def close(self) -> None:
        """Cut everything and stop listening."""
        self._stopping = True
        address = self.address
        self._wake()
        self._thread.join(5.0)
        self.cut()
        for one in (self._listener, self._wake_in, self._wake_out):
            one.close()
        self._selector.close()
        if isinstance(address, str):
            Path(address).unlink()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"w")

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._listener:
                    self._accept()
                elif ready is self._wake_in:
                    ready.recv(64)
                    self._follow_stall()
                elif not self.stalled.is_set():
                    self._forward(ready)

    def _follow_stall(self) -> None:
        with self._lock:
            for one in self._peer:
                watched = one in self._selector.get_map()
                if self.stalled.is_set() and watched:
                    self._selector.unregister(one)
                elif not self.stalled.is_set() and not watched:
                    self._selector.register(one, selectors.EVENT_READ)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.refusals:
            self.refusals -= 1
            client.close()
            return
        kind = socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET
        server = socket.socket(kind, socket.SOCK_STREAM)
        try:
            server.connect(self.target)
        except OSError:
            client.close()
            server.close()
            return
        with self._lock:
            self._peer[client] = (server, True)
            self._peer[server] = (client, False)
            if not self.stalled.is_set():
                self._selector.register(client, selectors.EVENT_READ)
                self._selector.register(server, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        with self._lock:
            if source not in self._peer:
                return
            sink, upward = self._peer[source]
        try:
            data, fds = _receive(source)
        except OSError:
            data, fds = b"", []
        data, limit_reached = self.within_limit(data, upward)
        if not data:
            for fd in fds:
                socket.close(fd)
        try:
            if data:
                _send(sink, data, fds)
        except OSError:
            data = b""  # who should get it is gone: this connection ends, the others go on
        if limit_reached:
            self.cut()
        elif not data:
            self._drop(source)

    def within_limit(self, data: bytes, upward: bool) -> tuple[bytes, bool]:
        """What of the data may pass, and whether the limit is reached with it."""
        limit = self.cut_after_up if upward else self.cut_after_down
        passed = self.passed_up if upward else self.passed_down
        if limit is not None:
            data = data[: max(0, limit - passed)]
        if upward:
            self.passed_up += len(data)
        else:
            self.passed_down += len(data)
        return data, limit is not None and passed + len(data) >= limit

    def _drop(self, one: socket.socket) -> None:
        with self._lock:
            if one not in self._peer:
                return
            other = self._peer.pop(one)[0]
            self._peer.pop(other, None)
            for end in (one, other):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def _listen(target: Address, listen_path: Path | None) -> socket.socket:
    if isinstance(target, str):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(listen_path or f"{target}.link"))
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    if source.family != socket.AF_UNIX:
        return source.recv(CHUNK_BYTES), []
    data, fds, _, _ = socket.recv_fds(source, CHUNK_BYTES, MAX_FDS)
    return data, fds


def _send(sink: socket.socket, data: bytes, fds: list[int]) -> None:
    if not fds:
        sink.sendall(data)
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sent = sink.sendmsg([data], rights)
    for fd in fds:
        socket.close(fd)
    sink.sendall(data[sent:])
