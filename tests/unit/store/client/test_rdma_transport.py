"""RDMA between a client and a node in this process, over a stand-in for the device."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.patience import eventually
from tests.fakes.rdma import StandIn, attachable
from tests.fakes.store import Memory, chain_of, content_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, Segments, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreRefused, StoreUnavailable
from kvrouter_store.node.rdma_host import RdmaHost
from kvrouter_store.rdma.base import (
    RdmaEndpoint,
    RdmaUnavailable,
    Region,
    TransferFailed,
    read_card,
    write_card,
)
from kvrouter_store.rdma.initiator import Initiator, RemotePool
from kvrouter_store.rdma.memory import RegisteredMemory
from kvrouter_store.rdma.options import RdmaOptions

BLOCK = 8192
MANIFEST = manifest_of(BLOCK)
Connect = Callable[..., StoreClient]


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path) as made:
        yield made


@pytest.fixture
def node() -> Iterator[StoreServer]:
    """Without a Unix socket, as on another host."""
    made = StoreServer(pool_bytes=1 << 20, granule_bytes=4096)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def host(node: StoreServer, stand_in: StandIn) -> Iterator[RdmaHost]:
    with attachable(node, stand_in.open) as made:
        yield made


@pytest.fixture
def connect(node: StoreServer, stand_in: StandIn) -> Iterator[Connect]:
    with contextlib.ExitStack() as made:

        def connect(transport: Any = "rdma", **options: Any) -> StoreClient:
            rdma = options.pop("rdma", None) or Initiator(opens=stand_in.open)
            url = f"kv://127.0.0.1:{node.port}"
            return made.enter_context(StoreClient(url, transport=transport, rdma=rdma, **options))

        yield connect


def no_device(options: RdmaOptions, rank: int) -> Any:
    raise RdmaUnavailable("this machine has no RDMA device: load its driver")


def got_back(client: StoreClient, hashes: bytes) -> bool:
    """Whether every block comes back as it must be."""
    blocks = len(hashes) // 32
    memory, span = Memory(blocks, BLOCK), range(blocks)
    statuses = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    right = Memory(blocks, BLOCK).holds(hashes).data
    return statuses == [BlockStatus.OK] * blocks and memory.data == right


def test_auto_takes_rdma_where_both_sides_have_it(
    host: RdmaHost, connect: Connect, node: StoreServer
) -> None:
    client, hashes = connect("auto"), chain_of(3)
    put_chain(client, MANIFEST, hashes)
    assert got_back(client, hashes)
    assert client.transport == "rdma"
    stats = node.stats()
    assert stats["bytes_in_total.rdma"] == stats["bytes_out_total.rdma"] == 3 * BLOCK
    assert stats["connections.rdma"] == 1


def test_auto_without_a_device_says_so_once_and_takes_tcp(
    host: RdmaHost, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        client = connect("auto", rdma=Initiator(opens=no_device))
        assert put_chain(client, MANIFEST, chain_of(2)) == 2
        assert client.match(MANIFEST, chain_of(2)).blocks == 2
    assert client.transport == "tcp"
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "RDMA" in line] == [
        "blocks travel over TCP, not RDMA: this machine has no RDMA device: load its driver"
    ]


def test_auto_with_a_node_that_has_none_takes_tcp(connect: Connect) -> None:
    client = connect("auto")
    assert put_chain(client, MANIFEST, chain_of(2)) == 2
    assert client.transport == "tcp"


def test_rdma_that_is_demanded_and_cannot_be_had_is_an_error(connect: Connect) -> None:
    with pytest.raises(RdmaUnavailable, match="no RDMA device"):
        connect("rdma", rdma=Initiator(opens=no_device))
    with pytest.raises(
        StoreUnavailable, match=r"transport 'rdma' cannot be had at kv://.*offers no"
    ):
        connect("rdma").stats()


def test_a_device_that_the_node_cannot_reach_is_found_out_at_the_start(
    host: RdmaHost, connect: Connect, tmp_path: Path, node: StoreServer
) -> None:
    elsewhere = tmp_path / "another fabric"
    elsewhere.mkdir()
    with pytest.raises(StoreUnavailable, match=r"cannot be had.*nobody is reached"):
        connect("rdma", rdma=Initiator(opens=StandIn(elsewhere).open)).stats()
    client = connect("auto", rdma=Initiator(opens=StandIn(elsewhere).open))
    assert put_chain(client, MANIFEST, chain_of(2)) == 2
    assert client.transport == "tcp"
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)


def test_a_connection_over_which_no_byte_comes_is_not_used(
    host: RdmaHost, connect: Connect, stand_in: StandIn, node: StoreServer
) -> None:
    def node_falls_silent(_: int) -> None:
        for pair in tuple(host.queue_pairs.values()):
            pair.fence()

    stand_in.before_copy = node_falls_silent
    with pytest.raises(StoreUnavailable, match=r"no byte comes over RDMA.*--hint-gid-index"):
        connect("rdma").stats()
    client = connect("auto")
    assert put_chain(client, MANIFEST, chain_of(2)) == 2
    assert client.transport == "tcp"
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)


def test_a_host_that_does_not_answer_holds_nobody_up(connect: Connect, node: StoreServer) -> None:
    node.offer_attach(4)
    with pytest.raises(StoreUnavailable):
        connect("rdma", deadline_s=0.2).stats()
    client = connect("auto", deadline_s=0.4)
    assert put_chain(client, MANIFEST, chain_of(2)) == 2
    assert client.transport == "tcp"
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)


def test_there_are_only_as_many_queue_pairs_as_may_be(
    connect: Connect, node: StoreServer, stand_in: StandIn
) -> None:
    with attachable(node, stand_in.open, most=1):
        first = connect("rdma")
        first.stats()
        with pytest.raises(StoreUnavailable, match="as many RDMA connections"):
            connect("rdma").stats()
        second = connect("auto")
        assert put_chain(second, MANIFEST, chain_of(2)) == 2
        assert second.transport == "tcp"
        first.close()
        assert eventually(lambda: node.stats()["queue_pairs"] == 0)
        assert got_back(connect("rdma"), chain_of(2))


def test_a_device_with_no_queue_pair_left_refuses(
    connect: Connect, node: StoreServer, stand_in: StandIn, tmp_path: Path
) -> None:
    with StandIn(tmp_path, most_pairs=0) as few, attachable(node, few.open):
        with pytest.raises(StoreUnavailable, match="gives no more queue pairs"):
            connect("rdma").stats()
        assert node.stats()["attaches_total.refused"] >= 1


def test_ranks_take_turns_on_several_devices_on_both_sides(
    node: StoreServer, connect: Connect, stand_in: StandIn
) -> None:
    options = RdmaOptions("one:3,two:4")
    with attachable(node, stand_in.open, options) as host:
        for rank in range(3):
            client = connect(rdma=Initiator(options, rank, stand_in.open))
            assert put_chain(client, MANIFEST, chain_of(2, str(rank))) == 2
        names = [device.name for device in stand_in.opened]
        assert names == ["one", "two", "one", "two", "one"]
        assert [len(device.pairs) for device in stand_in.opened[:2]] == [2, 1]
        assert len(host.queue_pairs) == 3


def test_memory_that_may_not_be_registered_is_streamed(
    host: RdmaHost, connect: Connect, stand_in: StandIn, node: StoreServer
) -> None:
    stand_in.refuses = lambda length: length > 4096
    client, hashes = connect("rdma"), chain_of(3)
    assert put_chain(client, MANIFEST, hashes) == 3
    assert got_back(client, hashes)
    stats = node.stats()
    assert (stats["bytes_in_total.rdma"], stats["bytes_in_total.tcp"]) == (0, 3 * BLOCK)


def test_slots_are_reserved_over_shared_memory_only(host: RdmaHost, connect: Connect) -> None:
    with pytest.raises(StoreRefused, match="over shared memory only"):
        connect("rdma").reserve(MANIFEST, 0, chain_of(1), range(1))


def test_read_only_memory_is_put_and_not_read_into(host: RdmaHost, connect: Connect) -> None:
    client, hashes = connect("rdma"), chain_of(1)
    content = content_of(hashes, BLOCK)
    frozen = Segments.over(content, BLOCK)
    assert client.put(MANIFEST, 0, hashes, range(1), frozen, [0]).stored == 1
    with pytest.raises(ValueError, match="not writable"):
        client.get_into(MANIFEST, 0, hashes, range(1), frozen, [0])


def test_a_host_that_ends_ends_its_connections(
    connect: Connect, node: StoreServer, stand_in: StandIn
) -> None:
    with attachable(node, stand_in.open) as host:
        client = connect("rdma")
        put_chain(client, MANIFEST, chain_of(2))
        host.close()
        assert node.stats()["queue_pairs"] == 0
        assert eventually(lambda: node.stats()["connections"] == 0)
        with pytest.raises(StoreUnavailable):
            client.match(MANIFEST, chain_of(2))


def test_a_node_that_drains_lets_an_attached_client_finish(
    host: RdmaHost, connect: Connect, node: StoreServer
) -> None:
    client, hashes = connect("rdma"), chain_of(2)
    put_chain(client, MANIFEST, hashes)
    with client.acquire(MANIFEST, hashes) as lease:
        node.drain()
        assert lease.view(0) == content_of(hashes[:32], BLOCK)
    assert eventually(lambda: node.stats()["connections"] == 0)
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)


def test_a_client_that_is_closed_leaves_nothing(
    host: RdmaHost, connect: Connect, node: StoreServer, stand_in: StandIn
) -> None:
    before = held(node)
    client = connect("rdma")
    put_chain(client, MANIFEST, chain_of(2))
    client.close()
    assert_gauges_return(node, before)
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)
    assert stand_in.opened[-1].pairs == set()
    assert stand_in.opened[-1].registrations == set()


def test_a_card_of_another_kind_is_refused(host: RdmaHost, node: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", node.port)) as link:
        link.sendall(_core.encode_hello(1) + _core.encode_attach(2, b"no card"))
        data = b""
        while b"endpoint" not in data:
            data += link.recv(4096)
    assert b"an RDMA endpoint has 32 bytes" in data


def test_a_card_is_an_endpoint_and_a_region() -> None:
    endpoint = RdmaEndpoint(77, 5, bytes(range(16)), 3, 4, 1, 8)  # type: ignore[arg-type]
    region = Region(4096, 1 << 20, 9)
    card = write_card(endpoint, region)
    assert read_card(card) == (endpoint, region)
    assert len(card) <= _core.MAX_CARD_BYTES
    for wrong in (b"", card[:-1], card + b"\0", bytes(len(card))):
        with pytest.raises(ValueError, match="RDMA"):
            read_card(wrong)


def test_a_slot_outside_of_the_pool_is_not_written(
    host: RdmaHost, connect: Connect, stand_in: StandIn
) -> None:
    client = connect("rdma")
    client.stats()
    (channel,) = client.channels()
    remote = channel.remote
    assert isinstance(remote, RemotePool)
    memory = Memory(1, BLOCK)
    with remote.memory.held(memory.segments, [0]) as keys:
        for offset in (-1, (1 << 20) - BLOCK + 1, 1 << 40):
            with pytest.raises(TransferFailed, match="outside of its pool"):
                remote.copies(keys, memory.segments, [0], [offset])


def test_memory_is_registered_once_and_given_back_with_its_segments(stand_in: StandIn) -> None:
    device: Any = stand_in.open(RdmaOptions())
    registered = RegisteredMemory(device)
    first, second = Memory(4, BLOCK), Memory(4, BLOCK)
    for _ in range(3):
        for memory in (first, second):
            with registered.held(memory.segments, [0, 3]):
                assert len(device.registrations) <= 2
    assert len(device.registrations) == len(registered) == 2
    del second, memory
    assert len(device.registrations) == len(registered) == 1
    registered.close()
    assert device.registrations == set()


def test_registered_memory_is_bounded_and_what_is_in_use_stays(stand_in: StandIn) -> None:
    device: Any = stand_in.open(RdmaOptions())
    registered = RegisteredMemory(device, most=2)
    memories = [Memory(1, BLOCK) for _ in range(5)]
    with registered.held(memories[0].segments, [0]) as keys:
        for memory in memories:
            with registered.held(memory.segments, [0]):
                pass
        address = memories[0].segments.pieces([0])[0][0][0]
        assert keys.of(address) in {one.lkey for one in device.registrations}
        assert len(device.registrations) == 2


def test_memory_in_use_outlives_its_segments_until_it_is_let_go(stand_in: StandIn) -> None:
    device: Any = stand_in.open(RdmaOptions())
    registered = RegisteredMemory(device)
    memory = Memory(1, BLOCK)
    with registered.held(memory.segments, [0]):
        del memory
        assert len(device.registrations) == 1
    assert device.registrations == set()


def test_layers_that_interleave_are_one_registration_and_a_gap_makes_two(
    stand_in: StandIn,
) -> None:
    device: Any = stand_in.open(RdmaOptions())
    registered = RegisteredMemory(device)
    base = 1 << 20
    interleaved = Segments([base, base + 64], [128, 128], [64, 64], blocks=8)
    apart = Segments([base, base + (1 << 16)], [-64, 64], [64, 32], blocks=8)
    with registered.held(interleaved, [0]) as keys:
        assert len(device.registrations) == 1
        assert keys.of(base) == keys.of(base + 64 + 128 * 7)
    with registered.held(apart, [0]) as keys:
        assert len(device.registrations) == 3
        assert keys.of(base - 64 * 7) != keys.of(base + (1 << 16))


def test_memory_of_unknown_length_is_registered_as_far_as_it_is_used(stand_in: StandIn) -> None:
    device: Any = stand_in.open(RdmaOptions())
    registered = RegisteredMemory(device)
    segments = Segments([1 << 20], [64], [64])
    for index, length in ((1, 128), (0, 128), (9, 640)):
        with registered.held(segments, [index]):
            assert [one.length for one in device.registrations][-1:] == [length]
    assert len(device.registrations) == 1
