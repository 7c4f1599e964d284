"""The asyncio client: pipelined, kept up in the background, and nothing left behind by a caller."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fakes.link import Link
from tests.fakes.patience import until
from tests.fakes.store import chain_of, manifest_of, put_chain

from kvrouter.prefix.groups import wait_landed
from kvrouter_store._core import MAX_HASHES, StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.asyncio_link import AsyncLink
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import Match, Place
from kvrouter_store.errors import StoreClosed, StoreRefused, StoreUnavailable

MANIFEST = manifest_of(4096)
PATIENCE_S = 10.0


@pytest.fixture
async def aio(url: str) -> AsyncIterator[AsyncStoreClient]:
    async with AsyncStoreClient(url, name="router") as client:
        yield client


async def test_the_control_operations_answer(aio: AsyncStoreClient, client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(3))
    assert (await aio.match(MANIFEST, chain_of(4))).blocks == 3
    assert await aio.held(MANIFEST, chain_of(4)) == [True, True, True, False]
    lease = await aio.acquire(MANIFEST, chain_of(4))
    assert lease.blocks == 3
    assert (await aio.stats())["leases"] == 1
    lease.release()
    lease.release()
    assert (await aio.stats())["leases"] == 0
    assert await aio.delete(MANIFEST, chain_of(3)[64:]) == 1
    assert await aio.purge() == 2


async def test_a_match_tells_the_places(aio: AsyncStoreClient, client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    match = await aio.match(MANIFEST, chain_of(2))
    assert [(place.blocks, place.tier) for place in match.places] == [(2, 0)]


@pytest.fixture
def roomy() -> Iterator[StoreServer]:
    """A node with room for more small blocks than one request may name."""
    server = StoreServer(pool_bytes=(MAX_HASHES + 64) * 4096, granule_bytes=4096)
    server.start()
    yield server
    server.stop()


async def test_a_chain_longer_than_one_request_is_matched_leased_and_deleted_by_both_clients(
    roomy: StoreServer,
) -> None:
    url, small, blocks = f"kv://127.0.0.1:{roomy.port}", manifest_of(64), MAX_HASHES + 3
    chain, longer = chain_of(blocks), chain_of(blocks + 2)
    with StoreClient(url, transport="tcp") as client:
        assert put_chain(client, small, chain) == blocks
        async with AsyncStoreClient(url, name="router") as aio:
            match = await aio.match(small, longer)
            assert match == client.match(small, longer) == Match(blocks, (Place(blocks, 0, 0),))
            asked = aio, [(small, None)]
            landing, leases = await wait_landed(*asked, chain, range(blocks), 5, lease=True)
            assert (landing.landed, len(leases.held)) == (True, 2)
            assert roomy.stats()["leased_blocks"] == blocks
            leases.release()
            beyond = await wait_landed(*asked, longer, range(blocks + 2), 0.05, lease=True)
            assert (beyond[0].landed, beyond[0].blocks, beyond[1].held) == (False, blocks, [])
            assert (await aio.acquire(small, longer)).blocks == MAX_HASHES
            assert client.acquire(small, longer).blocks == MAX_HASHES
            assert await aio.delete(small, chain[32:]) == blocks - 1
            assert client.delete(small, longer) == 1


async def test_many_requests_share_one_connection(
    aio: AsyncStoreClient, client: StoreClient, server: StoreServer
) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    before = server.stats()["connections"]
    chains = [chain_of(2, "a" if k % 2 else "b") for k in range(200)]
    matches = await asyncio.gather(*(aio.match(MANIFEST, chain) for chain in chains))
    assert [match.blocks for match in matches] == [2 if k % 2 else 0 for k in range(200)]
    assert server.stats()["connections"] == before


async def test_a_landing_is_pushed_while_others_are_asked(
    aio: AsyncStoreClient, client: StoreClient, server: StoreServer
) -> None:
    waiting = asyncio.create_task(aio.wait(MANIFEST, chain_of(2), 2, 10, lease=True))
    await until(lambda: server.stats()["waits"] == 1)
    assert (await aio.match(MANIFEST, chain_of(2))).blocks == 0
    await asyncio.to_thread(put_chain, client, MANIFEST, chain_of(2))
    landing = await waiting
    assert landing.landed
    assert landing.lease is not None
    assert server.stats()["leases"] == 1
    landing.lease.release()
    await until(lambda: server.stats()["leases"] == 0)


async def test_a_wait_ends_at_its_deadline(aio: AsyncStoreClient) -> None:
    landing = await aio.wait(MANIFEST, chain_of(2), 2, 0.05)
    assert (landing.landed, landing.blocks, landing.lease) == (False, 0, None)


async def test_a_cancelled_wait_is_cancelled_at_the_node(
    aio: AsyncStoreClient, server: StoreServer
) -> None:
    waiting = asyncio.create_task(aio.wait(MANIFEST, chain_of(2), 2, 60))
    await until(lambda: server.stats()["waits"] == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: server.stats()["waits"] == 0)
    assert aio.connected
    assert (await aio.match(MANIFEST, chain_of(1))).blocks == 0
    assert aio._link is not None
    assert not aio._link._orphans  # the node has answered both requests: none is ever late


async def test_a_node_that_hangs_is_noticed_by_a_wait_that_is_cancelled(
    server: StoreServer,
) -> None:
    assert server.unix_path is not None
    with Link(server.unix_path) as link:
        async with AsyncStoreClient(link.url, deadline_s=0.2) as client:
            waiting = asyncio.create_task(client.wait(MANIFEST, chain_of(2), 2, 60))
            await until(lambda: server.stats()["waits"] == 1)
            link.stall()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: not client.connected)


async def test_a_cancelled_acquire_leaves_no_lease(
    aio: AsyncStoreClient, client: StoreClient, server: StoreServer
) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    await aio.match(MANIFEST, chain_of(2))
    acquiring = asyncio.create_task(aio.acquire(MANIFEST, chain_of(2)))
    await asyncio.sleep(0)  # it has sent its request, and no reply can have been read
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    await aio.stats()  # its reply comes after that of the acquire
    await until(lambda: server.stats()["leases"] == 0)
    assert aio.connected


@pytest.mark.parametrize("reply_first", [True, False])
async def test_a_wait_cancelled_in_the_turn_of_its_reply_leaves_no_lease(
    aio: AsyncStoreClient,
    client: StoreClient,
    server: StoreServer,
    monkeypatch: pytest.MonkeyPatch,
    reply_first: bool,
) -> None:
    waiting = asyncio.create_task(aio.wait(MANIFEST, chain_of(2), 2, 60, lease=True))
    other = asyncio.create_task(aio.wait(MANIFEST, chain_of(2, "b"), 2, 60))
    await until(lambda: server.stats()["waits"] == 2)
    take_in = AsyncLink.data_received

    def cancelling(link: AsyncLink, data: bytes) -> None:
        if not reply_first:
            waiting.cancel()
        take_in(link, data)
        if reply_first:
            waiting.cancel()

    monkeypatch.setattr(AsyncLink, "data_received", cancelling)
    await asyncio.to_thread(put_chain, client, MANIFEST, chain_of(2))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: server.stats()["leases"] == 0)
    assert aio.connected
    assert not other.done()
    await asyncio.to_thread(put_chain, client, MANIFEST, chain_of(2, "b"))
    assert (await other).landed


async def test_a_refusal_by_the_node_is_reported(aio: AsyncStoreClient) -> None:
    with pytest.raises((StoreRefused, ValueError)):
        await aio.match(MANIFEST, b"short")
    assert aio.connected


async def test_without_a_node_operations_fail_at_once(url: str, server: StoreServer) -> None:
    server.stop()
    client = AsyncStoreClient(url)
    client.start()
    with pytest.raises(StoreUnavailable):
        await client.match(MANIFEST, chain_of(1))
    assert not client.connected
    await client.close()
    with pytest.raises(StoreClosed):
        await client.match(MANIFEST, chain_of(1))


async def test_it_comes_back_to_a_restarted_node(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    node = StoreServer(unix_path=path, pool_bytes=1 << 20)
    node.start()
    async with AsyncStoreClient(f"kv+unix://{path}") as client:
        await client.register(MANIFEST, engine="router")
        waiting = asyncio.create_task(client.wait(MANIFEST, chain_of(1), 1, 60))
        await until(lambda: node.stats()["waits"] == 1)
        epoch = client.epoch
        node.stop()
        with pytest.raises(StoreUnavailable):
            await waiting
        node = StoreServer(unix_path=path, pool_bytes=1 << 20)
        node.start()
        await until(lambda: client.connected)
        assert client.epoch != epoch
        (listed,) = await client.manifests()
        assert listed.engines == ("router",)
    node.stop()


async def test_a_link_that_stalls_is_given_up_and_replaced(server: StoreServer) -> None:
    assert server.unix_path is not None
    with Link(server.unix_path) as link:
        async with AsyncStoreClient(link.url, deadline_s=0.2) as client:
            await client.match(MANIFEST, chain_of(1))
            link.stall()
            with pytest.raises(StoreUnavailable):
                await client.match(MANIFEST, chain_of(1))
            link.resume()
            await until(lambda: client.connected)
            assert (await client.match(MANIFEST, chain_of(1))).blocks == 0


async def test_a_reply_in_pieces_is_put_together(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(20):
        client.register(manifest_of(4096, model=f"model {k}"), engine="e")
    take_in = AsyncLink.data_received

    def in_pieces(link: AsyncLink, data: bytes) -> None:
        for at in range(0, len(data), 7):
            take_in(link, data[at : at + 7])

    monkeypatch.setattr(AsyncLink, "data_received", in_pieces)
    async with AsyncStoreClient(f"kv+unix://{server.unix_path}") as aio:
        assert len(await aio.manifests()) == 20


async def test_a_socket_of_another_node_is_not_taken_for_its_own(
    server: StoreServer, tmp_path: Path
) -> None:
    path = tmp_path / "alike.sock"
    far = StoreServer(unix_path=str(path), pool_bytes=1 << 20)
    far.start()
    path.rename(tmp_path / "elsewhere.sock")
    with Link(server.unix_path or "", listen_path=path):
        async with AsyncStoreClient(f"kv://127.0.0.1:{far.port}") as aio:
            assert aio.epoch == far.epoch
            assert (await aio.match(MANIFEST, chain_of(1))).blocks == 0
    far.stop()


async def test_a_node_that_is_slow_over_its_unix_socket_is_asked_there_again(
    server: StoreServer, tmp_path: Path
) -> None:
    path, moved = Path(server.unix_path or ""), tmp_path / "moved.sock"
    path.rename(moved)
    with Link(str(moved), listen_path=path) as link:
        link.stall()
        async with AsyncStoreClient(f"kv://127.0.0.1:{server.port}", deadline_s=0.2) as client:
            assert not await client.reached()
            link.resume()
            await until(lambda: client.connected)
            assert (await client.match(MANIFEST, chain_of(1))).blocks == 0
            link.stall()
            with pytest.raises(StoreUnavailable):
                await client.match(MANIFEST, chain_of(1))
    moved.rename(path)


def test_a_tier_goes_on_only_where_it_has_all_before() -> None:
    memory, disk = Place(10, 0, 0), Place(16, 0, 1)
    found = Match(16, (memory, disk)).then(Match(5, (Place(5, 0, 0), Place(3, 0, 1))))
    assert found == Match(21, (memory, Place(19, 0, 1)))
