"""An engine hears from a real store what landed, and of a store that is gone, without polling."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess, chain_of, eventually, manifest_of, put_chain

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.landings import Landings

MANIFEST = manifest_of()
LONG_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as started:
        yield started


@pytest.fixture
def news() -> threading.Event:
    return threading.Event()


@pytest.fixture
def landings(node: StoreProcess, news: threading.Event) -> Iterator[Landings]:
    made = Landings(lambda: AsyncStoreClient(node.url), news, logging.getLogger("landings"))
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


def test_closing_ends_what_is_awaited_and_the_thread(
    landings: Landings, client: StoreClient
) -> None:
    coming = landings.follow(MANIFEST, chain_of(2), LONG_S)
    assert waits(client, 1)
    landings.close()
    assert coming.over
    assert "kvstore-landings" not in {thread.name for thread in threading.enumerate()}
    assert landings.follow(MANIFEST, chain_of(2), LONG_S).over
