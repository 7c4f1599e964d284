"""Leases, landings, registrations, reconnection and deadlines of the blocking client."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, content_of, manifest_of, overwrite_stored, put_chain

from kvrouter_store._core import BlockStatus, Segments, StoreServer, gather
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import (
    CorruptBlock,
    DeadlineExceeded,
    LeaseLost,
    StoreClosed,
    StoreUnavailable,
)

BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
Connect = Callable[..., StoreClient]


def test_auto_takes_shared_memory_on_the_same_host(client: StoreClient) -> None:
    assert client.transport == ""
    client.stats()
    assert client.transport == "shm"


def test_auto_takes_tcp_where_there_is_no_unix_socket() -> None:
    node = StoreServer(pool_bytes=1 << 20)
    node.start()
    with StoreClient(f"kv://127.0.0.1:{node.port}") as client:
        client.stats()
        assert client.transport == "tcp"
    with (
        StoreClient(f"kv://127.0.0.1:{node.port}", transport="shm") as client,
        pytest.raises(StoreUnavailable, match="use transport 'tcp'"),
    ):
        client.stats()
    node.stop()


def test_a_socket_of_another_node_is_not_taken_for_its_own(
    server: StoreServer, tmp_path: Path
) -> None:
    """In containers, one path means two sockets: each node tells clients its own."""
    path = tmp_path / "alike.sock"
    far = StoreServer(unix_path=str(path), pool_bytes=1 << 20)
    far.start()
    path.rename(tmp_path / "elsewhere.sock")
    link = Link(server.unix_path or "", listen_path=path)
    with link, StoreClient(f"kv://127.0.0.1:{far.port}") as client:
        put_chain(client, MANIFEST, chain_of(1))
        assert client.transport == "tcp"
    far.stop()
    assert server.stats()["blocks"] == 0


def test_what_is_reserved_is_invisible_until_committed(client: StoreClient) -> None:
    hashes = chain_of(2)
    memory = Memory(2, BLOCK).holds(hashes)
    with client.reserve(MANIFEST, 0, hashes, range(2)) as reservation:
        assert reservation.granted == 2
        crcs = reservation.fill(memory.segments, [0, 1])
        assert client.match(MANIFEST, hashes).blocks == 0
        assert client.get_into(MANIFEST, 0, hashes, range(1), Memory(1, BLOCK).segments, [0]) == [
            BlockStatus.MISSING
        ]
        assert reservation.commit(crcs) == [BlockStatus.OK] * 2
    assert client.match(MANIFEST, hashes).blocks == 2
    with pytest.raises(LeaseLost):
        reservation.commit(crcs)


@pytest.mark.parametrize("came", [0, 1, 3])
def test_slots_are_received_in_place_and_those_that_did_not_come_are_given_back(
    connect: Connect, server: StoreServer, came: int
) -> None:
    client, other = connect(), connect("tcp")
    there, hashes = chain_of(3, "there"), chain_of(3)
    put_chain(other, MANIFEST, there[: came * 32])

    def read(wanted: bytes, memory: Segments, places: Sequence[int]) -> list[BlockStatus]:
        assert wanted == hashes
        return other.get_into(MANIFEST, 0, there, range(3), memory, places)

    with client.reserve(MANIFEST, 0, hashes, range(3)) as reservation:
        crcs = reservation.receive(BLOCK, read)
        assert reservation.commit(crcs) == [BlockStatus.OK] * came
    assert server.stats()["reserved_blocks"] == 0
    got, expected = Memory(3, BLOCK), Memory(3, BLOCK).holds(there)
    statuses = client.get_into(MANIFEST, 0, hashes, range(3), got.segments, range(3))
    assert statuses == [BlockStatus.OK] * came + [BlockStatus.MISSING] * (3 - came)
    assert [got[k] for k in range(came)] == [expected[k] for k in range(came)]


def test_a_client_that_closes_while_slots_are_received_leaves_them_mapped_until_then(
    client: StoreClient,
) -> None:
    reservation = client.reserve(MANIFEST, 0, chain_of(2), range(2))

    def read(_: bytes, memory: Segments, places: Sequence[int]) -> list[BlockStatus]:
        client.close()
        return [BlockStatus.OK] * len(places)

    crcs = reservation.receive(BLOCK, read)  # reads what was received
    assert len(crcs) == 2
    with pytest.raises((LeaseLost, StoreUnavailable)):
        reservation.commit(crcs)


def test_a_reservation_that_is_left_is_aborted(client: StoreClient, server: StoreServer) -> None:
    with client.reserve(MANIFEST, 0, chain_of(2), range(2)):
        assert server.stats()["reserved_blocks"] == 2
    assert server.stats()["reserved_blocks"] == 0
    assert put_chain(client, MANIFEST, chain_of(2)) == 2


def test_a_block_that_another_reserved_is_busy(connect: Connect) -> None:
    first, second = connect(), connect("unix")
    with first.reserve(MANIFEST, 0, chain_of(1), range(1)):
        result = second.put(MANIFEST, 0, chain_of(1), range(1), Memory(1, BLOCK).segments, [0])
        assert result.statuses == (BlockStatus.BUSY,)
        assert result.refused == 1


def test_a_client_that_closes_gives_everything_back(connect: Connect, server: StoreServer) -> None:
    client = connect()
    put_chain(client, MANIFEST, chain_of(2))
    lease = client.acquire(MANIFEST, chain_of(2))
    client.reserve(MANIFEST, 0, chain_of(1, "b"), range(1))
    stats = server.stats()
    assert (stats["leases"], stats["reserved_blocks"]) == (1, 1)
    client.close()
    assert eventually(
        lambda: (
            server.stats()["leases"]
            + server.stats()["reserved_blocks"]
            + server.stats()["fenced_blocks"]
            == 0
        )
    )
    assert not lease.held
    assert lease.release() is False
    with pytest.raises(StoreClosed):
        client.stats()


def test_a_view_outlives_neither_its_lease_nor_its_connection(client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(1))
    lease = client.acquire(MANIFEST, chain_of(1))
    lease.release()
    with pytest.raises(LeaseLost):
        lease.view(0)
    other = client.acquire(MANIFEST, chain_of(1))
    client.close()
    with pytest.raises(LeaseLost):
        other.view(0)


def test_a_view_of_a_corrupt_block_is_refused(client: StoreClient, server: StoreServer) -> None:
    put_chain(client, MANIFEST, chain_of(1))
    overwrite_stored(server.unix_path or "", MANIFEST, chain_of(1), b"\x01" * BLOCK)
    with client.acquire(MANIFEST, chain_of(1)) as lease, pytest.raises(CorruptBlock):
        lease.view(0, verify=True)
    assert client.match(MANIFEST, chain_of(1)).blocks == 0


def test_a_reader_cannot_write_the_pool(server: StoreServer) -> None:
    address = parse_url(f"kv+unix://{server.unix_path}")
    reader = Channel(address, Credentials("reader"), Deadline(5), Access.READ)
    assert reader.pool is not None
    with pytest.raises(ValueError, match="read-only"):
        gather(reader.pool, Memory(1, BLOCK).segments, [0], [0], True)
    with pytest.raises(TypeError, match="read-only"):
        memoryview(reader.pool.slice(0, 16))[0] = 1
    reader.discard()


def test_a_wait_ends_when_the_last_block_lands(connect: Connect, server: StoreServer) -> None:
    waiter, writer = connect(), connect()
    hashes = chain_of(3)
    put_chain(writer, MANIFEST, hashes[:32])
    landings = []
    thread = threading.Thread(
        target=lambda: landings.append(waiter.wait(MANIFEST, hashes, 2, 10, lease=True))
    )
    thread.start()
    assert eventually(lambda: server.stats()["waits"] == 1)
    put_chain(writer, MANIFEST, hashes[:64])
    thread.join(10)
    (landing,) = landings
    assert landing.landed
    assert landing.blocks == 2
    assert landing.lease is not None
    assert landing.lease.view(1) == content_of(hashes[32:64], BLOCK)
    assert server.stats()["leases"] == 1
    assert landing.lease.release() is True


def test_a_wait_for_what_is_there_ends_at_once(client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    landing = client.wait(MANIFEST, chain_of(2), 2, deadline_s=10)
    assert (landing.landed, landing.blocks, landing.lease) == (True, 2, None)


def test_a_wait_ends_at_its_deadline(client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(1))
    landing = client.wait(MANIFEST, chain_of(2), 2, deadline_s=0.05, lease=True)
    assert (landing.landed, landing.blocks, landing.lease) == (False, 1, None)


def test_a_wait_for_more_than_the_chain_is_refused(client: StoreClient) -> None:
    with pytest.raises(ValueError, match="chain of 2"):
        client.wait(MANIFEST, chain_of(2), 3, deadline_s=1)


def test_other_operations_go_on_during_a_wait(client: StoreClient, server: StoreServer) -> None:
    done = threading.Event()

    def wait() -> None:
        client.wait(MANIFEST, chain_of(1), 1, deadline_s=10)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: server.stats()["waits"] == 1)
    assert put_chain(client, MANIFEST, chain_of(1)) == 1
    thread.join(10)
    assert done.is_set()


def test_closing_the_client_wakes_a_thread_that_waits(
    connect: Connect, server: StoreServer
) -> None:
    client = connect()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait(MANIFEST, chain_of(1), 1, deadline_s=60)
        except (StoreUnavailable, StoreClosed) as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: server.stats()["waits"] == 1)
    client.close()
    thread.join(5)
    assert len(raised) == 1
    assert eventually(lambda: server.stats()["waits"] == 0)


def test_a_manifest_is_listed_with_its_living_engines(connect: Connect) -> None:
    reader, engine = connect(), connect()
    registration = engine.register(MANIFEST, engine="http://e:1")
    (listed,) = [m for m in reader.manifests() if m.digest == MANIFEST.digest]
    assert listed.manifest == MANIFEST
    assert listed.manifest_id == registration.manifest_id
    assert listed.engines == ("http://e:1",)
    engine.close()
    assert eventually(lambda: reader.manifests()[0].engines == ())


def test_a_refusal_is_counted_and_shares_nothing(client: StoreClient, server: StoreServer) -> None:
    client.register(MANIFEST, engine="e", refusal="sliding window")
    assert server.stats()["refusals_total"] == 1
    assert [m.engines for m in client.manifests() if m.digest == MANIFEST.digest] in ([], [()])


def test_equal_blocks_of_two_specs_do_not_meet(client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(1))
    assert client.match(manifest_of(BLOCK, model="other"), chain_of(1)).blocks == 0


def test_delete_and_purge_forget_blocks(client: StoreClient, server: StoreServer) -> None:
    put_chain(client, MANIFEST, chain_of(3))
    assert client.delete(MANIFEST, chain_of(3)[64:]) == 1
    assert client.match(MANIFEST, chain_of(3)).blocks == 2
    assert client.purge() == 2
    assert server.stats()["blocks"] == 0
    assert client.stats()["used_bytes"] == 0


def test_a_server_that_is_away_is_reported_within_the_deadline_and_then_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with StoreClient(f"kv://127.0.0.1:{port}", deadline_s=1) as client:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no connection"):
            client.stats()
        with pytest.raises(StoreUnavailable, match="next try"):
            client.stats()
        assert time.monotonic() - started < 1


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(server: StoreServer) -> None:
    with (
        Link(("127.0.0.1", server.port)) as link,
        StoreClient(link.url, transport="tcp", deadline_s=0.5) as client,
    ):
        client.stats()
        link.stall()
        with pytest.raises(DeadlineExceeded):
            client.stats()
        started = time.monotonic()
        for _ in range(10):
            with pytest.raises(StoreUnavailable, match="next try"):
                put_chain(client, MANIFEST, chain_of(1))
        assert time.monotonic() - started < 0.5
        link.resume()
        assert eventually(lambda: _answers(client))
        assert put_chain(client, MANIFEST, chain_of(1)) == 1


def test_a_cut_link_is_replaced_without_the_caller_noticing(server: StoreServer) -> None:
    with Link(("127.0.0.1", server.port)) as link, StoreClient(link.url, transport="tcp") as client:
        put_chain(client, MANIFEST, chain_of(1))
        link.cut()
        assert client.match(MANIFEST, chain_of(1)).blocks == 1


def test_a_restarted_server_gets_the_manifests_again(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    node = StoreServer(unix_path=path, pool_bytes=1 << 20)
    node.start()
    with StoreClient(f"kv+unix://{path}") as client:
        client.register(MANIFEST, engine="e")
        put_chain(client, MANIFEST, chain_of(1))
        node.stop()
        node = StoreServer(unix_path=path, pool_bytes=1 << 20)
        node.start()
        assert eventually(lambda: _answers(client))
        assert client.match(MANIFEST, chain_of(1)).blocks == 0
        assert put_chain(client, MANIFEST, chain_of(1)) == 1
        assert client.manifests()[0].engines == ("e",)
    node.stop()


def test_a_lease_of_a_former_server_is_not_held(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    node = StoreServer(unix_path=path, pool_bytes=1 << 20)
    node.start()
    with StoreClient(f"kv+unix://{path}") as client:
        put_chain(client, MANIFEST, chain_of(1))
        lease = client.acquire(MANIFEST, chain_of(1))
        node.stop()
        node = StoreServer(unix_path=path, pool_bytes=1 << 20)
        node.start()
        assert eventually(lambda: not lease.held)
        assert lease.release() is False
    node.stop()


def test_hashes_of_another_length_are_refused(client: StoreClient) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        client.match(MANIFEST, b"no hash")
    assert client.match(MANIFEST, b"").blocks == 0


def _answers(client: StoreClient) -> bool:
    try:
        client.stats()
    except StoreUnavailable:
        return False
    return True


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_connection_of_its_parent_alone(
    client: StoreClient, server: StoreServer
) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    lease = client.acquire(MANIFEST, chain_of(2))
    child = os.fork()
    if child == 0:
        os._exit(_what_a_child_must_not_do(client, lease))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert server.stats()["leases"] == 1
    assert lease.view(1) == content_of(chain_of(2)[32:], BLOCK)
    assert lease.release() is True
    assert client.match(MANIFEST, chain_of(2)).blocks == 2


def _what_a_child_must_not_do(client: StoreClient, lease: Lease) -> int:
    """0 if all of it was refused. The pool is not mapped here, the link is somebody else's."""
    try:
        client.stats()
    except StoreClosed:
        pass
    else:
        return 1
    try:
        lease.view(0)
    except LeaseLost:
        pass
    else:
        return 2
    if lease.release():
        return 3
    client.close()
    return 0
