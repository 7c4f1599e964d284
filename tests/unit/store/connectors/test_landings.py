"""An engine hears from real nodes what landed, and of a node that is gone, without polling."""

import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.landings import Landings

pytestmark = pytest.mark.slow
MANIFEST = manifest_of()
LONG_S = 60.0
DEADLINE_S = 3.0  # of a node on a busy machine


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as started:
        yield started


@pytest.fixture
def news() -> threading.Event:
    return threading.Event()


@pytest.fixture
def landings(node: StoreProcess, news: threading.Event) -> Iterator[Landings]:
    made = Landings(
        lambda url: AsyncStoreClient(url or node.url, deadline_s=DEADLINE_S),
        news,
        logging.getLogger("landings"),
        beat_s=0.1,
    )
    yield made
    made.close()


@pytest.fixture
def client(node: StoreProcess) -> Iterator[StoreClient]:
    with StoreClient(node.url) as made:
        made.register(MANIFEST)
        yield made


def waits(client: StoreClient, count: int) -> bool:
    return eventually(lambda: client.stats()["waits"] == count)


def test_each_piece_is_told_when_it_lands(
    landings: Landings, client: StoreClient, news: threading.Event
) -> None:
    chain = chain_of(5)
    coming = landings.follow(MANIFEST, chain, LONG_S)
    assert waits(client, 1)
    assert (coming.landed, coming.over) == (0, False)
    put_chain(client, MANIFEST, chain[: 2 * 32])
    assert eventually(lambda: coming.landed == 2)
    assert news.is_set()
    assert waits(client, 1)
    assert not coming.over
    put_chain(client, MANIFEST, chain)
    assert eventually(lambda: coming.over)
    assert coming.landed == 5
    assert waits(client, 0)


def test_many_requests_wait_on_one_connection(landings: Landings, client: StoreClient) -> None:
    before = client.stats()["connections"]
    chains = [chain_of(1, f"chain {k}") for k in range(50)]
    comings = [landings.follow(MANIFEST, chain, LONG_S) for chain in chains]
    assert waits(client, 50)
    assert client.stats()["connections"] == before + 1
    for chain in chains:
        put_chain(client, MANIFEST, chain)
    assert eventually(lambda: all(coming.landed == 1 and coming.over for coming in comings))


def test_a_wait_ends_with_its_time(
    landings: Landings, client: StoreClient, news: threading.Event
) -> None:
    coming = landings.follow(MANIFEST, chain_of(2), 0.05)
    assert eventually(lambda: coming.over)
    assert coming.landed == 0
    assert news.is_set()


def test_a_dropped_wait_leaves_nothing_at_the_store(
    landings: Landings, client: StoreClient
) -> None:
    coming = landings.follow(MANIFEST, chain_of(2), LONG_S)
    assert waits(client, 1)
    coming.drop()
    assert waits(client, 0)
    assert eventually(lambda: coming.over)


def test_a_store_that_dies_ends_every_wait_at_once(landings: Landings, node: StoreProcess) -> None:
    with StoreClient(node.url) as client:
        client.register(MANIFEST)
        comings = [landings.follow(MANIFEST, chain_of(2, name), LONG_S) for name in "abc"]
        assert waits(client, 3)
    node.kill()
    assert eventually(lambda: all(coming.over for coming in comings))
    assert all(coming.landed == 0 for coming in comings)


def test_what_is_there_already_lands_at_once(landings: Landings, client: StoreClient) -> None:
    chain = chain_of(2)
    put_chain(client, MANIFEST, chain)
    coming = landings.follow(MANIFEST, chain, LONG_S)
    assert eventually(lambda: coming.over)
    assert coming.landed == 2


@pytest.fixture
def far() -> Iterator[StoreServer]:
    """A node that is reached over TCP alone."""
    started = StoreServer(pool_bytes=16 << 20)
    started.start()
    yield started
    started.stop()


def test_what_landed_together_costs_a_few_small_messages(
    landings: Landings, far: StoreServer
) -> None:
    landed, chain = 100, chain_of(2000)
    with (
        StoreClient(f"kv://127.0.0.1:{far.port}", transport="tcp") as client,
        Link(("127.0.0.1", far.port)) as link,
    ):
        put_chain(client, MANIFEST, chain[: landed * 32])
        coming = landings.follow(MANIFEST, chain, LONG_S, link.url)
        assert eventually(lambda: coming.landed == landed)
        assert waits(client, 1)
        assert not coming.over
        assert link.passed_up < 16 << 10  # the hashes of all blocks are 64 KB
        stats = client.stats()
        asked = sum(stats[f"operation_ns.{name}.le_inf"] for name in ("wait", "held"))
        assert asked < 10


def test_a_chain_of_more_blocks_than_one_request_names_is_awaited(
    landings: Landings, client: StoreClient
) -> None:
    chain = chain_of(20_000)
    coming = landings.follow(MANIFEST, chain, LONG_S)
    assert waits(client, 1)
    put_chain(client, MANIFEST, chain[: 3 * 32])
    assert eventually(lambda: coming.landed == 3)
    assert not coming.over


@pytest.fixture
def other(tmp_path: Path) -> Iterator[StoreProcess]:
    """Another node, which has every second block of `chain_of(6)`."""
    folder = tmp_path / "other"
    folder.mkdir()
    with StoreProcess(folder) as started:
        put_some(started)
        yield started


def put_some(node: StoreProcess) -> None:
    chain = chain_of(6)
    with StoreClient(node.url) as client:
        for at in range(0, len(chain), 64):
            put_chain(client, MANIFEST, chain[at : at + 32])


def found(landings: Landings, node: StoreProcess, wait_s: float = 0.0) -> frozenset[int]:
    """What the node says that it has of six blocks, in the end."""
    asked = landings.follow(MANIFEST, chain_of(6), wait_s, node.url)
    assert eventually(lambda: asked.over)
    return frozenset(place for place in range(6) if asked.came(place))


def test_another_node_is_asked_for_any_blocks_that_it_has_now(
    landings: Landings, other: StoreProcess
) -> None:
    assert found(landings, other) == {0, 2, 4}


def test_what_lands_at_another_node_is_told(
    landings: Landings, other: StoreProcess, client: StoreClient
) -> None:
    chain = chain_of(2, "b")
    coming = landings.follow(MANIFEST, chain, LONG_S, other.url)
    with StoreClient(other.url) as there:
        assert waits(there, 1)
        assert waits(client, 0)
        put_chain(there, MANIFEST, chain)
    assert eventually(lambda: coming.over)
    assert coming.came(1)


def test_a_node_that_hangs_costs_one_deadline_and_is_asked_again_when_it_goes_on(
    landings: Landings, other: StoreProcess
) -> None:
    assert found(landings, other) == {0, 2, 4}
    other.send(signal.SIGSTOP)
    try:
        assert found(landings, other) == set()  # waits for the answer
        assert found(landings, other) == set()  # waits for a new connection
        asked = [landings.follow(MANIFEST, chain_of(6), LONG_S, other.url) for _ in range(50)]
        assert eventually(lambda: all(each.over for each in asked), DEADLINE_S / 2)
    finally:
        other.send(signal.SIGCONT)
    assert eventually(lambda: found(landings, other) == {0, 2, 4})


@pytest.mark.parametrize("where", ["own", "other"])
def test_a_node_that_hangs_ends_what_is_awaited_long_before_its_time(
    landings: Landings, node: StoreProcess, other: StoreProcess, where: str
) -> None:
    hanging = node if where == "own" else other
    with StoreClient(hanging.url) as client:
        client.register(MANIFEST)
        url = "" if where == "own" else other.url
        comings = [landings.follow(MANIFEST, chain_of(2, name), LONG_S, url) for name in "bcd"]
        assert waits(client, 3)
    hanging.send(signal.SIGSTOP)
    try:
        assert eventually(lambda: all(coming.over for coming in comings), LONG_S / 2)
    finally:
        hanging.send(signal.SIGCONT)


def test_what_nobody_expected_ends_a_wait_and_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(url: str) -> AsyncStoreClient:
        raise ValueError(f"no file is for {url}")

    landings = Landings(refuse, threading.Event(), logging.getLogger("landings"))
    coming = landings.follow(MANIFEST, chain_of(1), LONG_S, "kv://127.0.0.1:1")
    assert eventually(lambda: coming.over)
    landings.close()
    assert "no file is for kv://127.0.0.1:1" in caplog.text


def test_a_node_that_died_delays_nothing_and_nobody_else(
    landings: Landings, other: StoreProcess, client: StoreClient
) -> None:
    assert found(landings, other) == {0, 2, 4}
    other.kill()
    assert found(landings, other, LONG_S) == set()
    chain = chain_of(2)
    put_chain(client, MANIFEST, chain)
    own = landings.follow(MANIFEST, chain, LONG_S)
    assert eventually(lambda: own.landed == 2)
    put_some(other.start())
    assert eventually(lambda: found(landings, other) == {0, 2, 4})


def test_closing_ends_what_is_awaited_and_the_thread(
    landings: Landings, client: StoreClient
) -> None:
    coming = landings.follow(MANIFEST, chain_of(2), LONG_S)
    assert waits(client, 1)
    landings.close()
    assert coming.over
    assert "kvstore-landings" not in {thread.name for thread in threading.enumerate()}
    assert landings.follow(MANIFEST, chain_of(2), LONG_S).over
