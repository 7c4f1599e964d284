"""TLS between clients and a node: who is served, what is said where it fails, and nothing hangs."""

import asyncio
import ctypes
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.patience import eventually, until
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, Segments, StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.errors import KVStoreError, StoreRefused, StoreUnavailable, Untrusted

MIB = 1 << 20
BLOCK = 300_001  # no multiple of a record
MANIFEST = manifest_of(BLOCK)
OK = BlockStatus.OK


@pytest.fixture
def server(authority: Authority) -> Iterator[StoreServer]:
    """A node under TLS without a Unix socket: everything travels over TCP."""
    node = StoreServer(pool_bytes=64 * MIB, tls=authority.sign().server())
    node.start()
    yield node
    node.stop()


@pytest.fixture
def url(server: StoreServer) -> str:
    return f"kvs://127.0.0.1:{server.port}"


@pytest.fixture
def client(url: str, authority: Authority) -> Iterator[StoreClient]:
    with StoreClient(url, tls=authority.trust) as client:
        yield client


def got(client: StoreClient, hashes: bytes) -> bytes:
    blocks = len(hashes) // 32
    memory, span = Memory(blocks, BLOCK), range(blocks)
    assert client.get_into(MANIFEST, 0, hashes, span, memory.segments, span) == [OK] * blocks
    return bytes(memory.data)


async def problem_of(client: AsyncStoreClient, kind: type[KVStoreError]) -> str:
    """What operations raise, once that is more than that there is no connection yet."""
    problem = KVStoreError()
    while type(problem) in {KVStoreError, StoreUnavailable}:
        await asyncio.sleep(0)
        with pytest.raises(KVStoreError) as refused:
            await client.stats()
        problem = refused.value
    assert isinstance(problem, kind)
    return str(problem)


def test_large_batches_come_back_as_they_were_put(client: StoreClient) -> None:
    hashes = chain_of(60)
    assert put_chain(client, MANIFEST, hashes) == 60
    assert got(client, hashes) == bytes(Memory(60, BLOCK).holds(hashes).data)
    assert client.transport == "tcp"


def test_blocks_of_many_small_pieces_come_back_as_they_were_put(client: StoreClient) -> None:
    sizes = [1, 511, 16_383, 16_384, 16_385, 40_000, 7, 0, 9] * 3
    manifest = manifest_of(sum(sizes))
    source, blocks = random.Random(1).randbytes(sum(sizes) * 4), range(4)
    there, back = bytearray(source), bytearray(len(source))

    def pieces(memory: bytearray) -> Segments:
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        bases = [base + sum(sizes[:k]) * 4 for k in range(len(sizes))]
        return Segments(bases, sizes, sizes, blocks=4)

    assert client.put(manifest, 0, chain_of(4), blocks, pieces(there), blocks).stored == 4
    assert client.get_into(manifest, 0, chain_of(4), blocks, pieces(back), blocks) == [OK] * 4
    assert back == source


def test_leases_and_landings_work_as_without(client: StoreClient, server: StoreServer) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    landing = client.wait(MANIFEST, hashes, 3, deadline_s=5, lease=True)
    assert landing.landed
    assert landing.lease is not None
    assert bytes(landing.lease.view(2)) == bytes(Memory(3, BLOCK).holds(hashes)[2])
    assert landing.lease.release() is True
    assert not client.wait(MANIFEST, chain_of(4), 4, deadline_s=0.01).landed
    assert server.stats()["leases"] == 0


async def test_the_asyncio_client_does_all_of_it_under_tls(
    url: str, client: StoreClient, authority: Authority, server: StoreServer
) -> None:
    async with AsyncStoreClient(url, tls=authority.trust) as aio:
        waiting = asyncio.create_task(aio.wait(MANIFEST, chain_of(2), 2, 10, lease=True))
        await until(lambda: server.stats()["waits"] == 1)
        await asyncio.to_thread(put_chain, client, MANIFEST, chain_of(2))
        landing = await waiting
        assert landing.lease is not None
        landing.lease.release()
        assert (await aio.match(MANIFEST, chain_of(3))).blocks == 2
        assert server.stats()["leases"] == 0
        assert len(await aio.manifests()) == 1
        assert await aio.delete(MANIFEST, chain_of(2)) == 2


def test_a_client_of_this_host_maps_the_pool_and_asks_for_it_under_tls(
    tmp_path: Path, authority: Authority
) -> None:
    unix_path = str(tmp_path / "s.sock")
    tls = authority.sign().server()
    node = StoreServer(unix_path=unix_path, pool_bytes=4 * MIB, tls=tls)
    node.start()
    with StoreClient(f"kvs://localhost:{node.port}", tls=authority.trust) as client:
        assert put_chain(client, manifest_of(4096), chain_of(3)) == 3
        assert client.transport == "shm"
    with (
        StoreClient(f"kvs://localhost:{node.port}") as stranger,
        pytest.raises(Untrusted),
    ):
        stranger.stats()
    node.stop()


@pytest.fixture(params=["another CA", "another name", "another address", "expired"])
def refusal(
    request: pytest.FixtureRequest, authority: Authority, tmp_path: Path
) -> Iterator[tuple[str, ClientTls, str]]:
    """The address of a node, what a client of it trusts, and what the client must say."""
    signed, trust, host = authority.sign(), authority.trust, "localhost"
    match request.param:
        case "another CA":
            trust = Authority(tmp_path, "other").trust
            said = "is not trusted.*KVROUTER_STORE_CA_FILE"
        case "another name":
            signed = authority.sign("store.example")
            said = "is of another host.*a name that is in the certificate"
        case "another address":
            signed, host = authority.sign("localhost", "127.0.0.2"), "127.0.0.1"
            said = "is of another host"
        case _:
            signed = authority.sign(expired=True)
            said = "certificate has expired"
    node = StoreServer(pool_bytes=MIB, tls=signed.server())
    node.start()
    yield f"kvs://{host}:{node.port}", trust, said
    assert eventually(lambda: node.stats()["connections"] == 0)
    assert node.stats()["tls_failures_total"] >= 1
    assert node.stats()["connections_total"] >= 1
    node.stop()


def test_a_node_that_is_not_who_it_should_be_is_told_nothing(
    refusal: tuple[str, ClientTls, str],
) -> None:
    url, trust, said = refusal
    with StoreClient(url, tls=trust) as client, pytest.raises(Untrusted, match=said):
        client.stats()


async def test_the_asyncio_client_says_the_same_and_logs_it_once(
    refusal: tuple[str, ClientTls, str], caplog: pytest.LogCaptureFixture
) -> None:
    url, trust, said = refusal
    client = AsyncStoreClient(url, tls=trust)
    client.start()
    assert re.search(said, await problem_of(client, Untrusted))
    await client.close()
    assert (
        len([one for one in caplog.records if one.name == "kvrouter_store.client.asyncio_client"])
        == 1
    )


@pytest.fixture
def strict(authority: Authority) -> Iterator[StoreServer]:
    """A node that asks clients for a certificate."""
    tls = authority.sign().server(ca_file=authority.ca_file)
    node = StoreServer(pool_bytes=4 * MIB, tls=tls)
    node.start()
    yield node
    node.stop()


async def test_a_node_that_asks_for_certificates_serves_who_shows_one(
    strict: StoreServer, authority: Authority
) -> None:
    url, shown = f"kvs://localhost:{strict.port}", authority.client("engine.example")
    with StoreClient(url, tls=shown) as client:
        assert put_chain(client, manifest_of(4096), chain_of(2)) == 2
    async with AsyncStoreClient(url, tls=shown) as aio:
        assert (await aio.match(manifest_of(4096), chain_of(2))).blocks == 2
    assert strict.stats()["tls_failures_total"] == 0


@pytest.mark.parametrize("by", ["nobody", "another CA"])
async def test_and_nobody_else(
    strict: StoreServer, authority: Authority, tmp_path: Path, by: str
) -> None:
    tls = authority.trust
    if by == "another CA":
        wrong = Authority(tmp_path, "other").sign()
        tls = ClientTls(authority.ca_file, wrong.cert_file, wrong.key_file)
    url = f"kvs://localhost:{strict.port}"
    said = "KVROUTER_STORE_CERT_FILE" if by == "nobody" else "unknown ca"
    with StoreClient(url, tls=tls) as client, pytest.raises(Untrusted, match=said):
        client.stats()
    aio = AsyncStoreClient(url, tls=tls)
    aio.start()
    assert re.search(said, await problem_of(aio, Untrusted))
    await aio.close()
    assert strict.stats()["tls_failures_total"] >= 2


async def test_a_plain_client_is_told_to_write_kvs(server: StoreServer) -> None:
    url = f"kv://127.0.0.1:{server.port}"
    with StoreClient(url) as client, pytest.raises(StoreRefused, match="write kvs://HOST:PORT"):
        client.stats()
    aio = AsyncStoreClient(url)
    aio.start()
    assert "write kvs://HOST:PORT" in await problem_of(aio, StoreRefused)
    await aio.close()
    assert server.stats()["tls_failures_total"] >= 2


async def test_a_tls_client_of_a_plain_node_never_goes_on_without(authority: Authority) -> None:
    node = StoreServer(pool_bytes=MIB)
    node.start()
    url = f"kvs://127.0.0.1:{node.port}"
    with (
        StoreClient(url, tls=authority.trust) as client,
        pytest.raises(Untrusted, match="does not speak TLS; write kv://"),
    ):
        client.stats()
    aio = AsyncStoreClient(url, tls=authority.trust)
    aio.start()
    assert "does not speak TLS; write kv://" in await problem_of(aio, Untrusted)
    await aio.close()
    node.stop()
