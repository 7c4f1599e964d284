"""Puts, gets and matches of the blocking client: bad arguments, broken links, many threads."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.link import Link
from tests.fakes.store import (
    HASH_BYTES,
    Memory,
    chain_of,
    manifest_of,
    put_chain,
)
from tests.fakes.trace import Trace

import kvrouter_store
from kvrouter_store._core import MAX_HASHES, BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import Match
from kvrouter_store.errors import StoreClosed

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


def test_a_match_of_half_a_hash_is_refused(warm: StoreClient) -> None:
    for ask in (warm.match, warm.held):
        with pytest.raises(ValueError, match="32 bytes"):
            ask(MANIFEST, CHAIN[:-1])
    assert warm.match(MANIFEST, CHAIN) == Match(0)


def test_a_wait_for_more_blocks_than_one_request_names_says_what_to_do(warm: StoreClient) -> None:
    many = bytes(HASH_BYTES * (MAX_HASHES + 1))
    with pytest.raises(ValueError, match="cut the chain"):
        warm.wait(MANIFEST, many, MAX_HASHES + 1, 0.0)
    assert not warm.wait(MANIFEST, many, 1, 0.0).landed


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
def test_what_does_not_fit_is_refused(
    warm: StoreClient, part: int, hashes: bytes, which: tuple[range, range], error: str
) -> None:
    memory, (span, indices) = Memory(8, BLOCK), which
    with pytest.raises(ValueError, match=error):
        warm.put(MANIFEST, part, hashes, span, memory.segments, indices)
    with pytest.raises(ValueError, match=error):
        warm.get_into(MANIFEST, part, hashes, span, memory.segments, indices)
    assert put_chain(warm, MANIFEST, CHAIN) == 4


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


def test_a_closed_client_stays_closed(warm: StoreClient) -> None:
    warm.close()
    with pytest.raises(StoreClosed):
        put_chain(warm, MANIFEST, CHAIN)


def test_a_put_and_a_get_go_through_a_dozen_files(warm: StoreClient) -> None:
    memory, package = Memory(4, BLOCK), Path(kvrouter_store.__file__).parent
    with Trace((package,)) as put:
        put_chain(warm, MANIFEST, CHAIN)
    with Trace((package,)) as got:
        warm.get_into(MANIFEST, 0, CHAIN, range(4), memory.segments, range(4))
    print(f"\na put of 4 blocks: {put}\na get of 4 blocks: {got}")
    assert max(len(put.files), len(got.files)) <= 12
