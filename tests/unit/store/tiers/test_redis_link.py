"""What Redis answers becomes values in the memory, however the bytes are cut on their way."""

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.certificates import Authority

from kvrouter_store.tiers.base import Item, TierStatus
from kvrouter_store.tiers.redis_link import CALLS, RedisLink, RedisLinks

PATIENCE_S = 10.0
OK, MISSING, FAILED = TierStatus.OK, TierStatus.MISSING, TierStatus.FAILED
FALSIFIED = TierStatus.FALSIFIED
SIZE = 6000
ITEMS = [Item(f"key {k}", k * SIZE, SIZE) for k in range(3)]


class Connection:
    """To a server that says what it is told, in pieces, and takes whatever comes."""

    socket_timeout = 5.0

    def __init__(self, server: socket.socket, sock: socket.socket, pieces: Iterable[bytes]) -> None:
        self._server = server
        self.sock = self._sock = sock
        self._pieces = pieces
        self._thread = threading.Thread(target=self._talk)

    def connect(self) -> None:
        self._thread.start()

    def disconnect(self) -> None:
        self._sock.close()
        self._thread.join()

    def _talk(self) -> None:
        for piece in self._pieces:
            self._server.sendall(piece)
        self._server.shutdown(socket.SHUT_WR)
        while self._server.recv(1 << 16):
            pass
        self._server.close()

    def can_read(self) -> bool:
        self.sock.settimeout(self.socket_timeout)
        return False


class ClosedConnection:
    """To a server that lets a client in once it is opened, and then says nothing."""

    socket_timeout = 1.0

    def __init__(self) -> None:
        self.server, self._sock = socket.socketpair()
        self.asking, self.opened = threading.Event(), threading.Event()

    async def asked(self) -> None:
        assert await asyncio.to_thread(self.asking.wait, PATIENCE_S)

    def connect(self) -> None:
        self.asking.set()
        assert self.opened.wait(PATIENCE_S)

    def disconnect(self) -> None:
        self._sock.close()


class TlsConnection:
    """To a server that greets, and then says nothing for longer than a test is patient."""

    socket_timeout = 0.2

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._sock: ssl.SSLSocket | None = None
        self._server: ssl.SSLSocket | None = None
        self._gone = threading.Timer(PATIENCE_S, self.disconnect)

    def connect(self) -> None:
        server, client = socket.socketpair()
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(*self._authority.sign())
        trusting = ssl.create_default_context(cafile=self._authority.ca_file)
        with ThreadPoolExecutor(1) as thread:
            greeting = thread.submit(shown.wrap_socket, server, server_side=True)
            self._sock = trusting.wrap_socket(client, server_hostname="localhost")
            self._server = greeting.result()
        self._sock.settimeout(self.socket_timeout)
        self._gone.start()

    def disconnect(self) -> None:
        self._gone.cancel()
        for end in (self._server, self._sock):
            if end is not None:
                end.close()


@contextmanager
def link_to(memory: bytearray, *pieces: bytes) -> Iterator[RedisLink]:
    link = RedisLink(Connection(*socket.socketpair(), pieces), memoryview(memory))
    try:
        yield link
    finally:
        link.close()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@given(st.lists(st.integers(0, 3 * SIZE), max_size=6))
def test_values_are_read_however_they_are_cut(cuts: list[int]) -> None:
    values = [bytes([k + 1]) * SIZE for k in range(3)]
    said = b"".join(map(bulk, values))
    ends = [0, *sorted(cuts), len(said)]
    memory = bytearray(3 * SIZE)
    pieces = (said[at:end] for at, end in pairwise(ends))
    with link_to(memory, *pieces) as link:
        assert link.load(ITEMS) == [OK] * 3
    assert memory == b"".join(values)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"$-1\r\n", MISSING),
        (b"_\r\n", MISSING),
        (b"-NOPERM to read\r\n", FAILED),
        (b"-WRONGTYPE of another kind\r\n", FALSIFIED),
        (bulk(b"short"), FALSIFIED),
        (bulk(b"x" * 20000), FALSIFIED),
        (bulk(b""), FALSIFIED),
    ],
)
def test_a_value_that_is_not_there_leaves_the_others_whole(said: bytes, status: TierStatus) -> None:
    memory, value = bytearray(3 * SIZE), b"v" * SIZE
    with link_to(memory, bulk(value), said, bulk(value)) as link:
        assert link.load(ITEMS) == [OK, status, OK]
    assert memory == value + bytes(SIZE) + value


def test_a_server_that_closes_within_a_value_ends_the_call() -> None:
    cut = bulk(b"v" * SIZE)[:-100]
    with link_to(bytearray(3 * SIZE), cut) as link, pytest.raises(ConnectionError):
        link.load(ITEMS)


@pytest.mark.parametrize("said", [b"-LOADING the dataset\r\n", b"-CLUSTERDOWN slots\r\n"])
def test_a_server_that_can_answer_nothing_ends_the_call(said: bytes) -> None:
    with link_to(bytearray(3 * SIZE), said) as link, pytest.raises(ConnectionError):
        link.holds(["a"])


def test_a_key_that_another_server_has_is_known_to_have_moved() -> None:
    with link_to(bytearray(3 * SIZE), b":1\r\n-MOVED 12 127.0.0.1:7001\r\n") as link:
        assert link.holds(["a", "b"]) == [True, False]
        assert link.errors == {"MOVED": "MOVED 12 127.0.0.1:7001"}


class OpenConnection:
    """To a server that says one thing, and keeps the connection."""

    socket_timeout = PATIENCE_S

    def __init__(self, said: bytes) -> None:
        self._server, self._sock = socket.socketpair()
        self._server.sendall(said)

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        self._server.close()
        self._sock.close()


@pytest.mark.parametrize("extra", [b"", b":0\r\n", b"\r\n", b":"])
def test_a_link_whose_server_said_more_than_it_was_asked_is_not_used_again(extra: bytes) -> None:
    with closing(RedisLink(OpenConnection(b":1\r\n" + extra), memoryview(b""))) as link:
        assert link.holds(["a"]) == [True]
        assert link.alive() is not bool(extra)


def test_a_link_that_waited_still_has_the_kernel_watch_the_time() -> None:
    """Not every parser of redis-py leaves the socket as it was when it looks what has come."""
    connection = Connection(*socket.socketpair(), [b":1\r\n"])
    with closing(RedisLink(connection, memoryview(b""))) as link:
        link.holds(["a"])
        link.alive()
        assert connection.sock.gettimeout() is None


def test_a_server_that_is_silent_over_tls_ends_the_call(tmp_path: Path) -> None:
    connection = TlsConnection(Authority(tmp_path))
    with closing(RedisLink(connection, memoryview(b""))) as link, pytest.raises(TimeoutError):
        link.holds(["a"])


def test_what_is_sent_while_a_link_is_cut_is_not_sent_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = TlsConnection(Authority(tmp_path))
    encrypted = []
    with closing(RedisLink(connection, memoryview(b""))) as link:
        with pytest.raises(TimeoutError):
            link.holds(["a"])
        with monkeypatch.context() as patch:
            shutdown = lambda sock, how: encrypted.append(sock.version())  # noqa: E731
            patch.setattr(socket.socket, "shutdown", shutdown)
            link.cut()
    assert encrypted == ["TLSv1.3"]


@pytest.fixture
def closed_connections() -> Iterator[list["ClosedConnection"]]:
    """One more than there are threads."""
    connections = [ClosedConnection() for _ in range(CALLS + 1)]
    yield connections
    for connection in connections:
        connection.server.close()
        connection.disconnect()


def links_over(connections: Iterable["ClosedConnection"]) -> RedisLinks:
    left = iter(connections)
    return RedisLinks(lambda _: next(left), memoryview(bytearray(3 * SIZE)), lambda _: None)


async def test_a_call_that_is_given_up_while_it_connects_asks_nothing(
    closed_connections: list["ClosedConnection"],
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
    connection, links = closed_connections[0], links_over(closed_connections)
    call = asyncio.create_task(links.call(None, RedisLink.load, ITEMS))
    await connection.asked()
    call.cancel()
    asyncio.get_running_loop().call_soon(connection.opened.set)  # after the cancellation
    await asyncio.wait({call})
    assert call.cancelled()
    assert connection.server.recv(1) == b""
    del call
    gc.collect()
    assert complaints == []


async def one_call_too_many(
    connections: list["ClosedConnection"],
) -> tuple[RedisLinks, list[asyncio.Task[list[TierStatus]]]]:
    """Links whose threads are all busy, and their calls, of which the last waits for a thread."""
    links = links_over(connections)
    calls = [asyncio.create_task(links.call(None, RedisLink.load, ITEMS)) for _ in range(CALLS + 1)]
    for connection in connections[:CALLS]:
        await connection.asked()
    return links, calls


async def test_a_call_that_is_given_up_before_it_has_a_thread_ends_at_once(
    closed_connections: list["ClosedConnection"],
) -> None:
    links, calls = await one_call_too_many(closed_connections)
    calls[-1].cancel()
    done, _ = await asyncio.wait(calls, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert done == {calls[-1]}
    await end(links, closed_connections, calls)


async def test_a_call_that_waits_for_a_thread_does_not_connect_after_the_end(
    closed_connections: list["ClosedConnection"],
) -> None:
    links, calls = await one_call_too_many(closed_connections)
    await end(links, closed_connections, calls)
    assert not closed_connections[-1].asking.is_set()


async def end(
    links: RedisLinks,
    connections: Iterable["ClosedConnection"],
    calls: Iterable[asyncio.Task[list[TierStatus]]],
) -> None:
    links.close()
    for connection in connections:
        connection.opened.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, ConnectionError | asyncio.CancelledError) for one in outcomes)
