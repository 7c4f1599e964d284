"""What Redis answers becomes values in the memory, however the bytes are cut on their way."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.tiers.base import Item, TierStatus
from kvrouter_store.tiers.redis_link import RedisLink

OK, MISSING, FAILED = TierStatus.OK, TierStatus.MISSING, TierStatus.FAILED
SIZE = 6000
ITEMS = [Item(f"key {k}", k * SIZE, SIZE) for k in range(3)]


class Connection:
    """To a server that says what it is told, in pieces, and takes whatever comes."""

    socket_timeout = 5.0

    def __init__(self, server: socket.socket, sock: socket.socket, pieces: Iterable[bytes]) -> None:
        self._server = server
        self._sock = sock
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
        (b"-WRONGTYPE of another kind\r\n", FAILED),
        (bulk(b"short"), FAILED),
        (bulk(b"x" * 20000), FAILED),
        (bulk(b""), FAILED),
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
        assert link.moved
