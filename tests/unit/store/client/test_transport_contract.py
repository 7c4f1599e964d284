"""What every transport promises: shared memory, a Unix socket, TCP, TCP under TLS, and RDMA."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.patience import eventually
from tests.fakes.raw import RawLink
from tests.fakes.rdma import StandIn, attachable
from tests.fakes.rdma_store import NodeBeside, overwrite_over_rdma, url_of
from tests.fakes.store import (
    PATIENCE_S,
    Memory,
    chain_of,
    content_of,
    manifest_of,
    overwrite_stored,
    put_chain,
)

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreRefused
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Initiator, Opens

OK, MISSING, CORRUPT = BlockStatus.OK, BlockStatus.MISSING, BlockStatus.CORRUPT
BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
Server = StoreServer | NodeBeside
REAL_RDMA = pytest.param("rdma", marks=pytest.mark.rdma)
"""Over the machine's own device; "stand-in" is RDMA over one that every machine has."""
RDMA_BESIDE = pytest.param("beside", marks=pytest.mark.rdma)
"""The same to a node on another machine."""
NAMES = {"tls": "tcp", "stand-in": "rdma", "beside": "rdma"}
"""What the transport of a kind is called, where that is another name."""


@pytest.fixture(params=["shm", "unix", "tcp", "tls", "stand-in", REAL_RDMA, RDMA_BESIDE])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opens(kind: str, tmp_path: Path) -> Iterator[Opens | None]:
    """What opens RDMA devices; None where the kind has none."""
    with StandIn(tmp_path) as stand_in:
        yield {"stand-in": stand_in.open, "rdma": open_device, "beside": open_device}.get(kind)


@pytest.fixture
def digests() -> bool:
    """Whether the node has them: else they are off."""
    return True


@pytest.fixture
def server(
    kind: str, tmp_path: Path, authority: Authority, opens: Opens | None, digests: bool
) -> Iterator[Server]:
    if kind == "beside":
        if not digests:
            pytest.skip("does not apply: the node on the other machine has digests")
        with contextlib.closing(NodeBeside()) as beside:
            yield beside
        return
    tls = authority.sign().server() if kind == "tls" else None
    path = str(tmp_path / "s.sock")
    node = StoreServer(unix_path=path, pool_bytes=16 << 20, tls=tls, digests=digests)
    node.start()
    with attachable(node, opens) if opens else contextlib.nullcontext():
        yield node
    node.stop()


@pytest.fixture
def connect(
    kind: str, server: Server, authority: Authority, opens: Opens | None
) -> Iterator[Callable[..., StoreClient]]:
    """Makes clients that use the transport, closed when the test ends."""
    with contextlib.ExitStack() as made:

        def connect(**options: Any) -> StoreClient:
            if kind == "tls":
                url, tls = f"kvs://localhost:{server.port}", authority.trust
                client = StoreClient(url, transport="tcp", tls=tls, **options)
            else:
                url, rdma = url_of(server), Initiator(opens=opens or open_device)
                transport: Any = NAMES.get(kind, kind)
                if opens is open_device:  # an emulated machine takes its time
                    options = {"deadline_s": PATIENCE_S, **options}
                client = StoreClient(url, transport=transport, rdma=rdma, **options)
            return made.enter_context(client)

        yield connect


@pytest.fixture
def overwrite(kind: str, server: Server, opens: Opens | None) -> Callable[[bytes, bytes], None]:
    """Changes the stored bytes of the first block of a chain behind the store's back."""
    if kind == "beside":
        return functools.partial(
            overwrite_over_rdma, url_of(server), opens or open_device, MANIFEST
        )
    return functools.partial(overwrite_stored, server.unix_path or "", MANIFEST)


@pytest.fixture
def client(connect: Callable[..., StoreClient]) -> StoreClient:
    return connect()


def test_the_transport_asked_for_is_the_one_used(client: StoreClient, kind: str) -> None:
    client.stats()
    assert client.transport == NAMES.get(kind, kind)


def test_what_was_put_is_got_back(client: StoreClient) -> None:
    hashes = chain_of(8)
    assert put_chain(client, MANIFEST, hashes) == 8
    memory = Memory(8, BLOCK)
    span = range(8)
    assert client.get_into(MANIFEST, 0, hashes, span, memory.segments, span) == [OK] * 8
    assert memory.data == Memory(8, BLOCK).holds(hashes).data


def test_a_get_writes_only_the_blocks_it_was_given(client: StoreClient) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    memory = Memory(6, BLOCK)
    untouched = b"\xaa" * BLOCK
    for k in range(6):
        memory[k] = untouched
    assert client.get_into(MANIFEST, 0, hashes, range(1, 3), memory.segments, [4, 1]) == [OK, OK]
    assert memory[4] == content_of(hashes[32:64], BLOCK)
    assert memory[1] == content_of(hashes[64:96], BLOCK)
    assert [memory[k] for k in (0, 2, 3, 5)] == [untouched] * 4


def test_a_put_that_exists_changes_nothing(client: StoreClient) -> None:
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    other = Memory(2, BLOCK)
    result = client.put(MANIFEST, 0, hashes, range(2), other.segments, [0, 1])
    assert (result.stored, result.existed, result.refused) == (0, 2, 0)
    memory = Memory(2, BLOCK)
    client.get_into(MANIFEST, 0, hashes, range(2), memory.segments, [0, 1])
    assert memory[1] == content_of(hashes[32:], BLOCK)


def test_a_put_that_exists_in_part_stores_the_rest(client: StoreClient) -> None:
    hashes = chain_of(5)
    put_chain(client, MANIFEST, hashes[:64])
    memory = Memory(5, BLOCK).holds(hashes)
    result = client.put(MANIFEST, 0, hashes, range(5), memory.segments, range(5))
    assert (result.stored, result.existed) == (3, 2)
    back = Memory(5, BLOCK)
    assert client.get_into(MANIFEST, 0, hashes, range(5), back.segments, range(5)) == [OK] * 5
    assert back.data == memory.data


def test_a_missing_key_is_answered_at_once(client: StoreClient) -> None:
    memory = Memory(2, BLOCK)
    got = client.get_into(MANIFEST, 0, chain_of(2), range(2), memory.segments, [0, 1])
    assert got == [MISSING, MISSING]


def test_a_get_stops_at_the_first_missing_block(client: StoreClient) -> None:
    hashes = chain_of(4)
    put_chain(client, MANIFEST, hashes)
    client.delete(MANIFEST, hashes[64:96])
    memory = Memory(4, BLOCK)
    got = client.get_into(MANIFEST, 0, hashes, range(4), memory.segments, range(4))
    assert got == [OK, OK, MISSING, MISSING]


def test_an_empty_span_moves_nothing(client: StoreClient) -> None:
    memory = Memory(1, BLOCK)
    assert client.put(MANIFEST, 0, chain_of(1), range(0), memory.segments, []).statuses == ()
    assert client.get_into(MANIFEST, 0, chain_of(1), range(1, 1), memory.segments, []) == []


def test_a_corrupt_block_is_reported_and_deleted(
    client: StoreClient, overwrite: Callable[[bytes, bytes], None]
) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    overwrite(hashes, b"\x00" * BLOCK)
    memory = Memory(3, BLOCK)
    got = client.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
    assert got == [CORRUPT, OK, OK]
    assert client.match(MANIFEST, hashes).blocks == 0
    assert put_chain(client, MANIFEST, hashes) == 1
    assert client.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3)) == [OK] * 3


def test_without_verification_corrupt_bytes_come_through(
    connect: Callable[..., StoreClient], overwrite: Callable[[bytes, bytes], None]
) -> None:
    hashes = chain_of(1)
    put_chain(connect(), MANIFEST, hashes)
    overwrite(hashes, b"\x00" * BLOCK)
    memory = Memory(1, BLOCK).holds(hashes)
    trusting = connect(verify=False)
    assert trusting.get_into(MANIFEST, 0, hashes, range(1), memory.segments, [0]) == [OK]
    assert memory[0] == b"\x00" * BLOCK


@pytest.mark.parametrize("digests", [False])
def test_with_digests_off_blocks_are_moved_and_nobody_looks_for_changes(
    client: StoreClient, server: Server, overwrite: Callable[[bytes, bytes], None]
) -> None:
    hashes, memory = chain_of(3), Memory(3, BLOCK)
    assert put_chain(client, MANIFEST, hashes) == 3
    assert client.match(MANIFEST, hashes).blocks == 3
    got = client.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
    assert got == [OK] * 3
    assert memory.data == Memory(3, BLOCK).holds(hashes).data
    overwrite(hashes, b"\x00" * BLOCK)
    assert client.get_into(MANIFEST, 0, hashes, range(1), memory.segments, [0]) == [OK]
    assert memory[0] == b"\x00" * BLOCK


@pytest.mark.parametrize("digests", [False])
def test_with_digests_off_nobody_computes_one(client: StoreClient, server: Server) -> None:
    hashes = chain_of(3)
    put_chain(client, MANIFEST, hashes)
    assert server.unix_path is not None
    with RawLink(server.unix_path) as link:
        manifest_id = link.register(MANIFEST)
        held = link.ask(_core.encode_acquire(link.next_id(), manifest_id, 0, hashes)).reply
    assert isinstance(held, _core.AcquireReply)
    assert held.crcs == [0] * 3


def test_a_block_larger_than_the_pool_is_refused_and_the_link_lives(client: StoreClient) -> None:
    memory = Memory(1, 20 << 20)
    with pytest.raises(StoreRefused, match="too large"):
        client.put(manifest_of(20 << 20), 0, chain_of(1), range(1), memory.segments, [0])
    assert put_chain(client, MANIFEST, chain_of(2, "small")) == 2


def test_a_full_pool_evicts_what_is_oldest(client: StoreClient) -> None:
    half = manifest_of(6 << 20)
    for seed in "abc":
        assert put_chain(client, half, chain_of(1, seed)) == 1
    assert [client.match(half, chain_of(1, seed)).blocks for seed in "abc"] == [0, 1, 1]


def test_nothing_leased_is_evicted(client: StoreClient) -> None:
    half = manifest_of(6 << 20)
    put_chain(client, half, chain_of(1, "a"))
    put_chain(client, half, chain_of(1, "b"))
    with client.acquire(half, chain_of(1, "a")), client.acquire(half, chain_of(1, "b")):
        assert put_chain(client, half, chain_of(1, "c")) == 0
        assert client.match(half, chain_of(1, "a")).blocks == 1
    assert put_chain(client, half, chain_of(1, "c")) == 1


def test_a_block_matches_when_all_its_parts_are_there(client: StoreClient) -> None:
    two = manifest_of(BLOCK, parts=2)
    hashes = chain_of(2)
    put_chain(client, two, hashes, part=0)
    assert client.match(two, hashes).blocks == 0
    memory = Memory(2, BLOCK)
    got = client.get_into(two, 0, hashes, range(2), memory.segments, range(2))
    assert got == [MISSING, MISSING]
    put_chain(client, two, hashes, part=1)
    assert client.match(two, hashes).blocks == 2
    assert client.get_into(two, 0, hashes, range(2), memory.segments, range(2)) == [OK, OK]


def test_held_tells_of_each_block_by_itself_whether_all_its_parts_are_there(
    client: StoreClient,
) -> None:
    two = manifest_of(BLOCK, parts=2)
    hashes = chain_of(4)
    for part, blocks in ((0, (0, 1, 3)), (1, (1, 2, 3))):
        for block in blocks:
            put_chain(client, two, hashes[block * 32 : block * 32 + 32], part)
    there = [False, True, False, True]
    backwards = b"".join(hashes[at : at + 32] for at in range(96, -1, -32))
    assert client.held(two, hashes) == there
    assert client.held(two, backwards) == there[::-1]
    assert client.held(manifest_of(BLOCK), hashes) == [True, True, False, True]
    assert client.held(two, b"") == []


def test_held_answers_for_more_blocks_than_one_request_holds(client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    many = bytes(32 * _core.MAX_HASHES) + chain_of(2)
    assert client.held(MANIFEST, many) == [False] * _core.MAX_HASHES + [True, True]


def test_more_blocks_than_one_request_holds_are_cut_up(client: StoreClient) -> None:
    manifest = manifest_of(512)
    hashes = chain_of(1030)
    assert put_chain(client, manifest, hashes) in range(1024, 1031)  # a granule each: all but full
    memory = Memory(1030, 512)
    found = client.match(manifest, hashes).blocks
    got = client.get_into(manifest, 0, hashes, range(1030), memory.segments, range(1030))
    assert got[:found] == [OK] * found


def test_a_view_of_a_lease_shows_the_block(client: StoreClient) -> None:
    hashes = chain_of(2)
    put_chain(client, MANIFEST, hashes)
    with client.acquire(MANIFEST, hashes) as lease:
        assert lease.blocks == 2
        view = lease.view(1)
        assert view.readonly
        assert view == content_of(hashes[32:], BLOCK)
        view.release()
        assert lease.release() is True
    assert lease.release() is False


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(client: StoreClient) -> None:
    memory = Memory(2, BLOCK)
    hashes = chain_of(2)
    with pytest.raises(ValueError, match="indices"):
        client.put(MANIFEST, 0, hashes, range(2), memory.segments, [0])
    with pytest.raises(ValueError, match="run of the chain"):
        client.put(MANIFEST, 0, hashes, range(1, 3), memory.segments, [0, 1])
    with pytest.raises(ValueError, match="bytes per block"):
        client.put(manifest_of(512), 0, hashes, range(2), memory.segments, [0, 1])
    with pytest.raises(ValueError, match="not part 1"):
        client.put(MANIFEST, 1, hashes, range(2), memory.segments, [0, 1])


def test_an_index_outside_the_memory_leaves_nothing_behind(
    client: StoreClient, server: Server
) -> None:
    memory = Memory(2, BLOCK)
    with pytest.raises(IndexError):
        client.put(MANIFEST, 0, chain_of(2), range(2), memory.segments, [0, 9])
    assert eventually(lambda: server.stats()["reserved_blocks"] == 0)
    put_chain(client, MANIFEST, chain_of(2))
    with pytest.raises(IndexError):
        client.get_into(MANIFEST, 0, chain_of(2), range(2), memory.segments, [0, 9])
    assert eventually(lambda: server.stats()["leases"] == 0)
    assert put_chain(client, MANIFEST, chain_of(2, "b")) == 2
