"""The short way of a put, get or match: taken where it can be, and no caller can tell."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from tests.fakes.link import Link
from tests.fakes.store import (
    HASH_BYTES,
    Memory,
    chain_of,
    eventually,
    manifest_of,
    overwrite_stored,
    put_chain,
)

from kvstore import long_way
from kvstore._core import MAX_HASHES, BlockStatus, StoreServer
from kvstore.answers import Match, Place
from kvstore.client import StoreClient
from kvstore.errors import DeadlineExceeded, StoreClosed, StoreUnavailable
from kvstore.transports.shm import SharedMemory
from kvstore.transports.stream import Stream

BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(4)


@pytest.fixture(params=["tcp", "shm"])
def warm(url: str, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    """A client that has put and got a block of another chain."""
    with StoreClient(url, transport=request.param, deadline_s=5) as client:
        chain, memory = chain_of(1, "warm"), Memory(1, BLOCK)
        put_chain(client, MANIFEST, chain)
        client.get_into(MANIFEST, 0, chain, range(1), memory.segments, [0])
        yield client


@pytest.fixture
def hurried(warm: StoreClient, monkeypatch: pytest.MonkeyPatch) -> StoreClient:
    """One that cannot take the long way any more."""

    def closed(*_: object) -> list[BlockStatus]:
        raise AssertionError("the long way was taken")

    for transport in (Stream, SharedMemory):
        monkeypatch.setattr(transport, "put", closed)
        monkeypatch.setattr(transport, "get_into", closed)
    monkeypatch.setattr(long_way, "match", closed)
    return warm


def test_what_follows_a_put_goes_the_short_way(hurried: StoreClient, server: StoreServer) -> None:
    assert put_chain(hurried, MANIFEST, CHAIN) == 4
    server.stats()  # it looks at what was posted
    sink, source = Memory(2, BLOCK), Memory(4, BLOCK).holds(CHAIN)
    got = hurried.get_into(MANIFEST, 0, CHAIN, range(2, 4), sink.segments, [1, 0])
    assert got == [BlockStatus.OK] * 2
    assert (sink[1], sink[0]) == (source[2], source[3])


@pytest.mark.parametrize("stored", [4, 2, 0])
def test_a_match_that_follows_goes_the_short_way(
    hurried: StoreClient, server: StoreServer, stored: int
) -> None:
    put_chain(hurried, MANIFEST, CHAIN[: stored * HASH_BYTES])
    server.stats()
    places = (Place(stored, 0, 0),) if stored else ()
    assert hurried.match(MANIFEST, CHAIN) == Match(stored, places)
    assert hurried.match(MANIFEST, b"") == Match(0)


def test_a_match_is_followed_by_one_the_short_way(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreClient(url, transport="tcp") as client:
        assert client.match(MANIFEST, CHAIN) == Match(0)
        monkeypatch.delattr(long_way, "match")
        assert client.match(MANIFEST, CHAIN) == Match(0)


def test_a_match_of_half_a_hash_or_too_many_is_refused_as_on_the_long_way(
    warm: StoreClient,
) -> None:
    for hashes in (CHAIN[:-1], bytes(HASH_BYTES * (MAX_HASHES + 1))):
        with pytest.raises(ValueError, match=r"32 bytes|MAX_HASHES"):
            warm.match(MANIFEST, hashes)
    assert warm.match(MANIFEST, CHAIN) == Match(0)


def test_more_puts_than_there_are_lent_slots_go_the_short_way(hurried: StoreClient) -> None:
    chains = [chain_of(3, str(number)) for number in range(200)]
    assert [put_chain(hurried, MANIFEST, chain) for chain in chains] == [3] * len(chains)
    memory = Memory(4, BLOCK).holds(chains[0])
    again = hurried.put(MANIFEST, 0, chains[0], range(3), memory.segments, range(3))
    assert again.statuses == (BlockStatus.EXISTS,) * 3


def test_what_is_missing_and_what_is_left_of_a_chain_is_told_as_on_the_long_way(
    warm: StoreClient,
) -> None:
    put_chain(warm, MANIFEST, CHAIN[: 2 * HASH_BYTES])
    memory = Memory(4, BLOCK)
    got = warm.get_into(MANIFEST, 0, CHAIN, range(4), memory.segments, range(4))
    assert got == [BlockStatus.OK] * 2 + [BlockStatus.MISSING] * 2
    assert memory.data[: 2 * BLOCK] == Memory(4, BLOCK).holds(CHAIN).data[: 2 * BLOCK]
    absent = chain_of(1, "absent")
    got = warm.get_into(MANIFEST, 0, absent, range(1), memory.segments, [0])
    assert got == [BlockStatus.MISSING]


@pytest.mark.parametrize(
    ("part", "hashes", "which", "error"),
    [
        (0, CHAIN[:-1], (range(4), range(4)), "32 bytes each"),
        (0, CHAIN, (range(5), range(5)), "is no run"),
        (0, CHAIN, (range(-1, 1), range(2)), "is no run"),
        (0, CHAIN, (range(0, 4, 2), range(2)), "is no run"),
        (0, CHAIN, (range(4), range(3)), "as many indices"),
        (1, CHAIN, (range(4), range(4)), "not part 1"),
        (-1, CHAIN, (range(4), range(4)), "not part -1"),
    ],
)
def test_what_does_not_fit_is_refused_as_on_the_long_way(
    warm: StoreClient, part: int, hashes: bytes, which: tuple[range, range], error: str
) -> None:
    memory, (span, indices) = Memory(8, BLOCK), which
    with pytest.raises(ValueError, match=error):
        warm.put(MANIFEST, part, hashes, span, memory.segments, indices)
    with pytest.raises(ValueError, match=error):
        warm.get_into(MANIFEST, part, hashes, span, memory.segments, indices)
    assert put_chain(warm, MANIFEST, CHAIN) == 4


def test_memory_of_another_size_or_too_little_of_it_is_refused(warm: StoreClient) -> None:
    with pytest.raises(ValueError, match="bytes per block"):
        warm.put(MANIFEST, 0, CHAIN, range(1), Memory(4, 2 * BLOCK).segments, [0])
    with pytest.raises(IndexError):
        warm.put(MANIFEST, 0, CHAIN, range(1), Memory(4, BLOCK).segments, [4])
    with pytest.raises(IndexError):
        warm.get_into(MANIFEST, 0, chain_of(1, "warm"), range(1), Memory(4, BLOCK).segments, [4])
    assert put_chain(warm, MANIFEST, CHAIN) == 4


def test_nothing_to_move_is_no_error(warm: StoreClient) -> None:
    memory = Memory(1, BLOCK)
    assert warm.put(MANIFEST, 0, b"", range(0), memory.segments, []).statuses == ()
    assert warm.get_into(MANIFEST, 0, b"", range(0), memory.segments, []) == []


def test_a_manifest_that_is_equal_but_another_object_is_served(warm: StoreClient) -> None:
    assert put_chain(warm, manifest_of(BLOCK), CHAIN) == 4


def test_a_corrupt_block_is_forgotten_as_on_the_long_way(
    warm: StoreClient, server: StoreServer
) -> None:
    put_chain(warm, MANIFEST, CHAIN)
    assert server.unix_path is not None
    overwrite_stored(server.unix_path, MANIFEST, CHAIN[:HASH_BYTES], os.urandom(BLOCK))
    memory = Memory(1, BLOCK)
    got = warm.get_into(MANIFEST, 0, CHAIN, range(1), memory.segments, [0])
    assert got == [BlockStatus.CORRUPT]
    assert warm.match(MANIFEST, CHAIN).blocks == 0


def test_a_cut_link_is_replaced_without_the_caller_noticing(server: StoreServer) -> None:
    with Link(("127.0.0.1", server.port)) as link, StoreClient(link.url, transport="tcp") as client:
        put_chain(client, MANIFEST, chain_of(1, "first"))
        link.cut()
        assert put_chain(client, MANIFEST, CHAIN) == 4
        link.cut()
        memory = Memory(4, BLOCK)
        got = client.get_into(MANIFEST, 0, CHAIN, range(4), memory.segments, range(4))
        assert got == [BlockStatus.OK] * 4
        link.cut()
        assert client.match(MANIFEST, CHAIN).blocks == 4


def test_a_node_that_hangs_is_given_up_at_the_deadline_and_then_at_once(
    server: StoreServer,
) -> None:
    with (
        Link(("127.0.0.1", server.port)) as link,
        StoreClient(link.url, transport="tcp", deadline_s=0.5) as client,
    ):
        put_chain(client, MANIFEST, chain_of(1, "first"))
        link.stall()
        with pytest.raises(DeadlineExceeded):
            put_chain(client, MANIFEST, CHAIN)
        started = time.monotonic()
        for _ in range(10):
            with pytest.raises(StoreUnavailable, match="next try"):
                put_chain(client, MANIFEST, CHAIN)
            with pytest.raises(StoreUnavailable, match="next try"):
                client.match(MANIFEST, CHAIN)
        assert time.monotonic() - started < 0.5
        link.resume()
        assert eventually(lambda: _answers(lambda: put_chain(client, MANIFEST, CHAIN)))


def test_a_restarted_server_gets_the_manifest_again() -> None:
    node = StoreServer(pool_bytes=1 << 20)
    node.start()
    with StoreClient(f"kv://127.0.0.1:{node.port}", transport="tcp", deadline_s=5) as client:
        assert put_chain(client, MANIFEST, CHAIN) == 4
        again = StoreServer(pool_bytes=1 << 20, port=node.port)
        node.stop()
        again.start()
        try:
            assert client.match(MANIFEST, CHAIN).blocks == 0
            assert put_chain(client, MANIFEST, CHAIN) == 4
        finally:
            again.stop()


def test_more_threads_than_connections_all_get_their_turn(warm: StoreClient) -> None:
    begin = threading.Barrier(24)

    def put_and_get(number: int) -> bool:
        chain, sink = chain_of(2, f"thread {number}"), Memory(2, BLOCK)
        begin.wait()
        for _ in range(20):
            put_chain(warm, MANIFEST, chain)
            got = warm.get_into(MANIFEST, 0, chain, range(2), sink.segments, range(2))
            if got != [BlockStatus.OK] * 2:
                return False
        return sink.data == Memory(2, BLOCK).holds(chain).data

    with ThreadPoolExecutor(begin.parties) as pool:
        assert all(pool.map(put_and_get, range(begin.parties)))


def test_what_interrupts_a_put_is_raised_and_the_next_put_has_another_connection(
    server: StoreServer,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with (
            Link(("127.0.0.1", server.port)) as link,
            StoreClient(link.url, transport="tcp", deadline_s=20) as client,
        ):
            put_chain(client, MANIFEST, chain_of(1, "first"))
            link.stall()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                put_chain(client, MANIFEST, CHAIN)
            link.resume()
            assert put_chain(client, MANIFEST, chain_of(2, "next")) == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_arguments_of_other_types_are_refused_and_cost_no_later_call(warm: StoreClient) -> None:
    memory, wrong = Memory(4, BLOCK), cast("int", "0")
    with pytest.raises(TypeError):
        warm.put(MANIFEST, wrong, CHAIN, range(4), memory.segments, range(4))
    with pytest.raises(TypeError):
        warm.get_into(MANIFEST, wrong, CHAIN, range(4), memory.segments, range(4))
    assert put_chain(warm, MANIFEST, CHAIN) == 4


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_client_that_is_dropped_unclosed_is_no_more(url: str) -> None:
    client = StoreClient(url, transport="tcp")
    assert put_chain(client, MANIFEST, CHAIN) == 4
    left = weakref.ref(client._session)
    del client
    gc.collect()
    assert left() is None


def test_a_closed_client_stays_closed(warm: StoreClient) -> None:
    warm.close()
    with pytest.raises(StoreClosed):
        put_chain(warm, MANIFEST, CHAIN)


def test_a_forked_child_leaves_the_connection_of_its_parent_alone(warm: StoreClient) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            put_chain(warm, MANIFEST, CHAIN)
        except StoreClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert put_chain(warm, MANIFEST, CHAIN) == 4


def _answers(operation: Callable[[], object]) -> bool:
    try:
        operation()
    except StoreUnavailable:
        return False
    return True
