"""What breaks other stores, done to a node in a process of its own: nothing crashes, hangs or lies.

What was done to a peer (and what it did)           Held by
--------------------------------------------------  --------------------------------------------
two writers and a reader of one key                 test_contention
  (InfiniStore: the server dies within 2 s)           ::test_two_writers_and_a_reader_of_one_key
a missing key (InfiniStore: the client hangs)       store/test_transport_contract
                                                      ::test_a_missing_key_is_answered_at_once
a half-written key (InfiniStore: served, then a     test_frames::test_half_a_payload_is_invisible_
  crash)                                              while_its_sender_pauses; test_cut_links
a value larger than the pool (InfiniStore: the      store/test_transport_contract
  connection is dead)                                 ::test_a_block_larger_than_the_pool_is_refused
                                                      and_the_link_lives
kill -9 amid puts, the same client afterwards,      test_restart
  restart at the same address (InfiniStore, then      ::test_clients_live_through_the_death_of_
  Mooncake: of no use any more)                       the_node
far more than the pool (lmcache_server: grows)      test_four_pools_full_are_put_into_one
reads during eviction                               test_what_is_read_while_it_is_evicted_...
random bytes; a valid magic, a random body          test_frames::test_a_thousand_random_frames_...,
  (InfiniStore: the server dies at the 114th)         ..._mutated_frames_do_no_harm; csrc/fuzz
a body of 4 GiB announced                           test_an_announced_body_costs_no_memory
one key put 1,200 times, then a purge               test_one_key_put_1200_times
a second put with other bytes (Mooncake: "stored",  store/test_transport_contract
  and keeps the old ones)                             ::test_a_put_that_exists_changes_nothing
the node killed with leases outstanding (Mooncake:  test_a_node_killed_with_leases_outstanding
  its keys go on existing)
all blocks leased, and 100 more puts                test_a_hundred_puts_into_a_pool_that_is_all_...
a lease that runs out in a read (Mooncake: -707)    store/test_transport_contract
                                                      ::test_nothing_leased_is_evicted
a dead client's pins (LMCache: the cache is full)   test_killed_clients, test_soak
connections half open, or closed early              test_connections_that_say_nothing_or_leave_...
300 random payloads at the HTTP port                test_noise_at_the_http_port
"""

import contextlib
import http.client
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gauges import HELD
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.errors import LeaseLost, StoreUnavailable

MIB = 1 << 20
POOL = 16
BLOCK = 64 << 10
CHAIN_BLOCKS = 8
MANIFEST = manifest_of(BLOCK)
CHAINS = POOL * MIB // BLOCK // CHAIN_BLOCKS  # that fill the pool
DEADLINE_S = 20.0
OK, MISSING = BlockStatus.OK, BlockStatus.MISSING
KINDS: tuple[TransportName, ...] = ("shm", "unix", "tcp")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    """A node with a pool of 16 MiB: alive at the end, and nobody holds anything there."""
    node = StoreProcess(tmp_path, f"{POOL}MiB").start()
    yield node
    with StoreClient(node.url, transport="tcp", deadline_s=DEADLINE_S) as client:
        idle = dict.fromkeys(HELD, 0) | {"connections": 1}
        assert eventually(lambda: {name: client.stats()[name] for name in idle} == idle)
        client.purge()
        assert client.stats()["used_bytes"] == 0
        put_and_read(client, "the node still works")
    assert node.stop() == 0


@pytest.fixture(params=KINDS)
def client(node: StoreProcess, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    with StoreClient(node.url, transport=request.param, deadline_s=DEADLINE_S) as client:
        yield client


def put_and_read(client: StoreClient, seed: str) -> None:
    hashes = chain_of(CHAIN_BLOCKS, seed)
    assert put_chain(client, MANIFEST, hashes) == CHAIN_BLOCKS
    assert read(client, seed) == CHAIN_BLOCKS


def read(client: StoreClient, seed: str) -> int:
    """How many leading blocks of the chain there are; each with the bytes that belong to it."""
    hashes = chain_of(CHAIN_BLOCKS, seed)
    memory, right = Memory(CHAIN_BLOCKS, BLOCK), Memory(CHAIN_BLOCKS, BLOCK).holds(hashes)
    span = range(CHAIN_BLOCKS)
    got = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    found = got.count(OK)
    assert got == [OK] * found + [MISSING] * (CHAIN_BLOCKS - found)
    assert memory.data[: found * BLOCK] == right.data[: found * BLOCK]
    return found


def own_memory_kib(pid: int) -> int:
    """What the process has touched of its own, without the shared pool."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def test_four_pools_full_are_put_into_one(node: StoreProcess, client: StoreClient) -> None:
    put_and_read(client, "first")
    before = own_memory_kib(node.pid)
    for number in range(4 * CHAINS):
        assert put_chain(client, MANIFEST, chain_of(CHAIN_BLOCKS, str(number))) == CHAIN_BLOCKS
        assert read(client, str(number)) == CHAIN_BLOCKS
    stats = client.stats()
    assert stats["evictions_total.capacity"] >= 3 * CHAINS * CHAIN_BLOCKS
    assert stats["blocks"] <= CHAINS * CHAIN_BLOCKS
    assert own_memory_kib(node.pid) < before + 8 * 1024


def test_what_is_read_while_it_is_evicted_is_right_or_missing(
    node: StoreProcess, client: StoreClient
) -> None:
    found, failures = [0, 0], []
    done = threading.Event()

    def read_on() -> None:
        dice = random.Random(5)
        try:
            with StoreClient(node.url, deadline_s=DEADLINE_S) as reader:
                while not done.is_set() or 0 in found:
                    blocks = read(reader, str(dice.randrange(2 * CHAINS)))
                    found[0] += blocks
                    found[1] += CHAIN_BLOCKS - blocks
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read_on)
    thread.start()
    for number in range(4 * CHAINS):
        put_chain(client, MANIFEST, chain_of(CHAIN_BLOCKS, str(number % (2 * CHAINS))))
    done.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert failures == []


def test_an_announced_body_costs_no_memory(node: StoreProcess) -> None:
    """Nobody is believed who says that 4 GiB, or as much as is allowed, will come."""
    with StoreClient(node.url, transport="tcp", deadline_s=DEADLINE_S) as client:
        client.register(MANIFEST)
        before = own_memory_kib(node.pid)
        links = []
        for number in range(60):
            body_bytes = (0xFFFFFFFF, _core.MAX_BODY_BYTES, 16384 * 32)[number % 3]
            frame = bytearray(_core.encode_match(2, 1, chain_of(4)))
            struct.pack_into("<I", frame, 20, body_bytes)
            link = socket.create_connection(("127.0.0.1", node.port), timeout=DEADLINE_S)
            link.sendall(_core.encode_hello(1, name="liar") + frame)
            links.append(link)
        put_and_read(client, "meanwhile")
        assert own_memory_kib(node.pid) < before + 16 * 1024
        for link in links:
            link.close()


def test_one_key_put_1200_times(client: StoreClient) -> None:
    """Each time with other bytes: what was there first stays, until it is deleted."""
    one = chain_of(1)
    memory = Memory(1, BLOCK)
    for number in range(1200):
        memory[0] = bytes([number % 251]) * BLOCK
        result = client.put(MANIFEST, 0, one, range(1), memory.segments, [0])
        assert (result.stored, result.existed) == (int(number % 100 == 0), int(number % 100 != 0))
        if number % 100 == 99:
            client.get_into(MANIFEST, 0, one, range(1), memory.segments, [0])
            assert memory[0] == bytes([(number - 99) % 251]) * BLOCK
            assert (client.delete(MANIFEST, one) if number % 200 == 99 else client.purge()) == 1
    assert client.match(MANIFEST, one).blocks == 0


def test_a_node_killed_with_leases_outstanding(tmp_path: Path) -> None:
    node = StoreProcess(tmp_path, f"{POOL}MiB").start()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(StoreClient(node.url, transport=kind, deadline_s=2))
            for kind in KINDS
        ]
        for client, seed in zip(clients, KINDS, strict=True):
            put_and_read(client, seed)
        leases = [
            client.acquire(MANIFEST, chain_of(CHAIN_BLOCKS, seed))
            for client, seed in zip(clients, KINDS, strict=True)
        ]
        reservation = clients[0].reserve(MANIFEST, 0, chain_of(2, "never"), range(2))
        node.kill()
        for lease in leases:
            assert not lease.held
            assert not lease.release()
            with pytest.raises(LeaseLost):
                lease.view(0)
        with pytest.raises((StoreUnavailable, LeaseLost)):
            reservation.commit([0, 0])
        node.start()
        for client, seed in zip(clients, KINDS, strict=True):
            assert eventually(lambda c=client, s=seed: matched(c, s) == 0)
            put_and_read(client, seed)
        names = ("leases", "reserved_blocks", "fenced_blocks")
        assert not any(clients[0].stats()[name] for name in names)
    assert node.stop() == 0


def matched(client: StoreClient, seed: str) -> int | None:
    """None while the client does not reach the node."""
    try:
        return client.match(MANIFEST, chain_of(CHAIN_BLOCKS, seed)).blocks
    except StoreUnavailable:
        return None


def test_a_hundred_puts_into_a_pool_that_is_all_leased(client: StoreClient) -> None:
    for number in range(CHAINS):
        put_and_read(client, str(number))
    assert client.stats()["free_bytes"] == 0
    leases = [
        client.acquire(MANIFEST, chain_of(CHAIN_BLOCKS, str(number))) for number in range(CHAINS)
    ]
    assert sum(lease.blocks for lease in leases) == CHAINS * CHAIN_BLOCKS
    for number in range(100):
        assert put_chain(client, MANIFEST, chain_of(1, f"more {number}")) == 0
    assert client.stats()["no_space_total"] >= 100
    assert client.stats()["evictions_total.capacity"] == 0
    for number in range(CHAINS):
        assert read(client, str(number)) == CHAIN_BLOCKS
    assert all(lease.release() for lease in leases)
    assert put_chain(client, MANIFEST, chain_of(1, "more")) == 1


def test_connections_that_say_nothing_or_leave_at_once(node: StoreProcess) -> None:
    targets = (socket.AF_UNIX, node.unix_path), (socket.AF_INET, ("127.0.0.1", node.port))
    fds = len(list(Path(f"/proc/{node.pid}/fd").iterdir()))
    silent = []
    for number in range(300):
        family, address = targets[number % 2]
        link = socket.socket(family)
        link.settimeout(DEADLINE_S)
        link.connect(address)
        said = (b"", _core.encode_hello(1)[: number % 40], _core.encode_hello(1))[number % 3]
        link.sendall(said)
        if number % 4 == 0:
            link.shutdown(socket.SHUT_WR)
        if number % 5 == 0:
            silent.append(link)
        else:
            link.close()
    with StoreClient(node.url, deadline_s=DEADLINE_S) as client:
        put_and_read(client, "meanwhile")
    for link in silent:
        link.close()
    assert eventually(lambda: len(list(Path(f"/proc/{node.pid}/fd").iterdir())) <= fds)


def test_noise_at_the_http_port(node: StoreProcess) -> None:
    dice = random.Random(300)
    starts = (b"", b"GET /stats HTTP/1.1\r\n", b"POST /purge HTTP/1.1\r\nContent-Length: ", b"GET ")
    for number in range(300):
        with socket.create_connection(("127.0.0.1", node.http_port), timeout=DEADLINE_S) as link:
            link.sendall(starts[number % len(starts)] + dice.randbytes(dice.randint(1, 400)))
            if number % 3 == 0:
                link.shutdown(socket.SHUT_WR)
    for path, status in (("/healthz", 200), ("/selftest", 200), ("/stats", 200), ("/nothing", 404)):
        asked = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=DEADLINE_S)
        asked.request("GET", path)
        assert asked.getresponse().status == status
        asked.close()
