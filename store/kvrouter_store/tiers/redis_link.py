"""Values between a Redis server and the tier's memory: sent from there, and received into it.

redis-py makes the connection (TLS, password, database). Its pipelines copy what they send once and
what they get several times, while they hold Python's lock; here only the kernel copies.
"""

import asyncio
import contextlib
import select
import socket
import ssl
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, TypeVar

from kvrouter_store.tiers.base import Item, TierStatus, complete

CALLS: Final = 16
"""At a time: of each batch, one for each master of a cluster."""
IOV_MAX: Final = 1024
AHEAD_BYTES: Final = 4096
"""What is received together with a line, to be copied."""
AWAY: Final = ("LOADING", "CLUSTERDOWN", "MASTERDOWN")
"""Errors of a server that can answer nothing now."""
MOVED: Final = ("MOVED", "ASK")
"""Errors of a server of a cluster that names another one."""
GIVING: Final = ("OOM", "MISCONF", "NOREPLICAS")
"""Errors of a server that stores nothing now, and gives what it has."""
NIL: Final = (b"$-1", b"_")
CLOSED: Final = "the server has closed the connection"
Server = tuple[str, int] | None
T = TypeVar("T")
R = TypeVar("R")


class RedisLink:
    """One connection. Its calls block, one at a time; OSError or RedisError: it is of no more use.

    connection: of redis-py's blocking client, not connected, with protocol 2.

    Attributes:
        errors: what the server has said instead of an answer, the last of each kind.
    """

    def __init__(self, connection: Any, view: memoryview) -> None:
        self._connection = connection
        self._view = view
        self._socket: socket.socket | None = None
        self._cut = False
        self._flags = 0
        self._ahead = b""
        self.errors: dict[str, str] = {}

    def probe(self, keys: Sequence[str]) -> list[bool]:
        """Look at keys, and store nothing: SET would, with XX, if there were a value."""
        self._send([_command("EXISTS", key) + _command("SET", key, "", "XX") for key in keys])
        for _ in range(2 * len(keys)):
            self._line()
        for kind, error in self.errors.items():
            if kind not in MOVED + GIVING:
                raise ConnectionError(error)
        return [True] * len(keys)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """EXISTS each."""
        self._send([_command("EXISTS", key) for key in keys])
        return [self._line() == b":1" for _ in keys]

    def drop(self, keys: Sequence[str]) -> list[bytes]:
        """DEL each."""
        self._send([_command("DEL", key) for key in keys])
        return [self._line() for _ in keys]

    def store(self, items: Sequence[Item], expiry: Sequence[str]) -> list[TierStatus]:
        """SET each. `expiry`: further words."""
        begin = b"*%d\r\n%b" % (3 + len(expiry), _word("SET"))
        end = b"\r\n" + b"".join(map(_word, expiry))
        data: list[bytes | memoryview] = []
        for item in items:
            data.append(b"%b%b$%d\r\n" % (begin, _word(item.key), item.size))
            data += [self._view[item.at : item.at + item.size], end]
        self._send(data)
        return [TierStatus.OK if self._line() == b"+OK" else TierStatus.FAILED for _ in items]

    def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """GET each."""
        self._send([_command("GET", item.key) for item in items])
        return [self._take(item) for item in items]

    def alive(self) -> bool:
        """Whether the server still has the connection, and has sent nothing unasked."""
        poll = select.poll()  # redis-py's own question may set Python's time-out again
        poll.register(self._connected(), select.POLLIN)
        return not self._ahead and not poll.poll(0)

    def cut(self) -> None:
        """End the call that runs, or that will. Safe in any thread."""
        self._cut = True
        link = self._connection._sock  # also while redis-py logs in over it
        if link is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)  # that of TLS would first end TLS

    def close(self) -> None:
        """End the connection, when no call runs."""
        self._connection.disconnect()

    def _connected(self) -> socket.socket:
        """The kernel watches the time: Python would ask before each call whether it would wait.

        Not over TLS, which asks the kernel again when its time is over.
        """
        if self._socket is None and not self._cut:
            self._connection.connect()
            self._socket = link = self._connection._sock
            if not isinstance(link, ssl.SSLSocket):
                seconds, part = divmod(self._connection.socket_timeout, 1)
                patience = struct.pack("@ll", int(seconds), int(part * 1e6))
                link.settimeout(None)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
                self._flags = socket.MSG_WAITALL
        if self._socket is None or self._cut:
            raise ConnectionError("the call was given up")
        return self._socket

    def _send(self, data: Sequence[bytes | memoryview]) -> None:
        link = self._connected()
        if isinstance(link, ssl.SSLSocket):
            for piece in data:
                link.sendall(piece)
            return
        left = deque(data)
        while left:
            sent = link.sendmsg(islice(left, IOV_MAX))
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = memoryview(left[0])[sent:]

    def _take(self, item: Item) -> TierStatus:
        line = self._line()
        if line in NIL:
            return TierStatus.MISSING
        if line[:1] != b"$":
            wrong = line.startswith(b"-WRONGTYPE")
            return TierStatus.FALSIFIED if wrong else TierStatus.FAILED
        size = int(line[1:])
        if size != item.size:
            self._skip(size + 2)
            return TierStatus.FALSIFIED
        self._fill(self._view[item.at : item.at + size])
        self._skip(2)
        return TierStatus.OK

    def _line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            self._ahead += self._more()
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        if line.startswith(b"-"):
            error = line[1:].decode(errors="replace")
            if error.startswith(AWAY):
                raise ConnectionError(error)
            self.errors[error.partition(" ")[0]] = error
        return line

    def _fill(self, view: memoryview) -> None:
        size = min(len(view), len(self._ahead))
        view[:size], self._ahead = self._ahead[:size], self._ahead[size:]
        while size < len(view):
            received = self._connected().recv_into(view[size:], 0, self._flags)
            if not received:
                raise ConnectionError(CLOSED)
            size += received

    def _skip(self, size: int) -> None:
        while size > len(self._ahead):
            size -= len(self._ahead)
            self._ahead = self._more()
        self._ahead = self._ahead[size:]

    def _more(self) -> bytes:
        received = self._connected().recv(AHEAD_BYTES)
        if not received:
            raise ConnectionError(CLOSED)
        return received


def _word(word: str) -> bytes:
    data = word.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(_word, words))


class RedisLinks:
    """Links to servers, each used by one call at a time, and the threads of calls. One event loop.

    connect: makes a connection of redis-py to a server, HOST and port, or the only one.
    heard: is called with each error that a server has answered; what it raises, its call raises.
    """

    def __init__(
        self, connect: Callable[[Server], Any], view: memoryview, heard: Callable[[str], None]
    ) -> None:
        self._connect = connect
        self._view = view
        self._heard = heard
        self._idle: defaultdict[Server, list[RedisLink]] = defaultdict(list)
        self._busy: set[RedisLink] = set()
        self._threads = ThreadPoolExecutor(CALLS, "kvstore-redis")

    async def call(self, server: Server, call: Callable[[RedisLink, T], R], what: T) -> R:
        """The result of a call over a link. Once cancelled, it ends when nothing runs any more."""
        link = self._idle_link(server) or RedisLink(self._connect(server), self._view)
        self._busy.add(link)
        job = self._threads.submit(call, link, what)
        work = asyncio.wrap_future(job)
        try:
            result = await asyncio.shield(work)
        except BaseException as error:
            link.cut()
            job.cancel()  # where it waits for a thread
            await complete(asyncio.gather(work, return_exceptions=True))
            link.close()
            if isinstance(error, BlockingIOError | TimeoutError):
                raise TimeoutError("no answer in time") from None
            raise
        finally:
            self._busy.remove(link)
        self._idle[server].append(link)
        errors, link.errors = link.errors, {}
        for each in errors.values():
            self._heard(each)
        return result

    def close(self) -> None:
        """End all links, and calls that run."""
        for link in self._busy:
            link.cut()
        for links in self._idle.values():
            for link in links:
                link.close()
        self._threads.shutdown(wait=False)

    def _idle_link(self, server: Server) -> RedisLink | None:
        links = self._idle[server]
        while links:
            link = links.pop()
            if link.alive():
                return link
            link.close()
        return None
