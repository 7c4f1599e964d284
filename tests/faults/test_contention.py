"""Two writers and a reader on one key, many threads on one client: every byte read is right."""

import threading
from collections.abc import Callable
from typing import Literal

import pytest
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient

BLOCK = 16 << 10
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(3)
ROUNDS = 150
JOIN_S = 60
Kind = Literal["shm", "unix", "tcp"]


def discard(_: object) -> None:
    """For actions whose result nobody needs."""


def run_together(*actions: Callable[[], None]) -> None:
    """Run the actions in threads and raise what any of them raised."""
    raised: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads)
    if raised:
        raise raised[0]


def write(client: StoreClient) -> None:
    for number in range(ROUNDS):
        put_chain(client, MANIFEST, CHAIN)
        if number % 3 == 0:
            client.delete(MANIFEST, CHAIN)


def read(client: StoreClient, done: threading.Event) -> None:
    right = Memory(3, BLOCK).holds(CHAIN)
    found = 0
    while not done.is_set() or found == 0:
        memory = Memory(3, BLOCK)
        got = client.get_into(MANIFEST, 0, CHAIN, range(3), memory.segments, range(3))
        for k, status in enumerate(got):
            assert status in (BlockStatus.OK, BlockStatus.MISSING)
            if status == BlockStatus.OK:
                found += 1
                assert memory[k] == right[k]


@pytest.mark.parametrize(
    "kinds", [("shm", "shm", "shm"), ("tcp", "tcp", "tcp"), ("shm", "tcp", "unix")]
)
def test_two_writers_and_a_reader_of_one_key(
    server: StoreServer, url: str, kinds: tuple[Kind, Kind, Kind]
) -> None:
    before = held(server)
    done = threading.Event()
    first, second, third = (StoreClient(url, transport=kind, deadline_s=20) for kind in kinds)

    def writers() -> None:
        run_together(lambda: write(first), lambda: write(second))
        put_chain(first, MANIFEST, CHAIN)
        done.set()

    run_together(writers, lambda: read(third, done))
    for client in (first, second, third):
        client.close()
    assert_gauges_return(server, before)


@pytest.mark.parametrize("kind", ["shm", "unix", "tcp"])
def test_one_client_serves_many_threads(server: StoreServer, url: str, kind: Kind) -> None:
    before = held(server)
    with StoreClient(url, transport=kind, deadline_s=20) as client:

        def work(seed: str) -> None:
            for number in range(20):
                hashes = chain_of(4, f"{seed} {number}")
                right = Memory(4, BLOCK).holds(hashes)
                assert (
                    client.put(MANIFEST, 0, hashes, range(4), right.segments, range(4)).refused == 0
                )
                with client.acquire(MANIFEST, hashes) as lease:
                    back = Memory(4, BLOCK)
                    got = client.get_into(
                        MANIFEST, 0, hashes, range(lease.blocks), back.segments, range(lease.blocks)
                    )
                    assert got == [BlockStatus.OK] * lease.blocks
                    assert back.data[: lease.blocks * BLOCK] == right.data[: lease.blocks * BLOCK]

        run_together(*(lambda seed=str(k): work(seed) for k in range(8)))
        assert server.stats()["leases"] == 0
    assert_gauges_return(server, before)


def test_more_threads_wait_than_there_are_connections(server: StoreServer, url: str) -> None:
    """Waits take connections; the client has a limit, and stays usable below it."""
    with StoreClient(url, deadline_s=20) as client:
        landed: list[bool] = []
        waiters = [
            lambda: landed.append(client.wait(MANIFEST, CHAIN, 3, deadline_s=15).landed)
            for _ in range(12)
        ]
        run_together(*waiters, lambda: discard(put_chain(client, MANIFEST, CHAIN)))
        assert landed == [True] * 12
