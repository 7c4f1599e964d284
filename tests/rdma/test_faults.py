"""What goes wrong with RDMA: bounded errors, no wrong byte, nothing leaked.

Over the stand-in on any machine, over a real device where there is one (`make rdma`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import doomed_client
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.patience import eventually
from tests.fakes.rdma import StandIn, attachable
from tests.fakes.rdma_store import NodeBeside, RdmaStore, url_of
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable
from kvrouter_store.node.rdma_host import RdmaHost
from kvrouter_store.rdma.base import Copy
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Initiator, Opens, RemotePool

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = 64 << 10
MANIFEST = manifest_of(BLOCK)
POOL_BYTES = 4 << 20
PATIENCE_S = 60.0
# A silent peer is given up after half a second; an emulated machine takes its own time.
BOUND_S = 20.0
# Of tests.fakes.doomed_client over RDMA. Step 4 is the line that a new connection reads.
STEPS, AMID_THE_TRANSFER = 16, 11
pytestmark = pytest.mark.timeout(100)
Node = StoreServer | NodeBeside
Connect = Callable[..., StoreClient]
Bend = Callable[[list[Copy]], list[Copy]]


DEVICE = pytest.param("rdma", marks=pytest.mark.rdma)
BESIDE = pytest.param("beside", marks=pytest.mark.rdma)
anywhere = pytest.mark.parametrize("where", ["stand-in", DEVICE, BESIDE], indirect=True)


@pytest.fixture(params=["stand-in", DEVICE])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Stand-ins in a folder; the device, and a node on this machine or on the one beside it."""
    return f"stand-in:{tmp_path}" if request.param == "stand-in" else str(request.param)


@pytest.fixture
def opens(where: str, tmp_path: Path) -> Iterator[Opens]:
    with StandIn(tmp_path) as stand_in:
        yield stand_in.open if "stand-in" in where else open_device


@pytest.fixture
def node(where: str) -> Iterator[Node]:
    if where == "beside":
        with contextlib.closing(NodeBeside()) as beside:
            yield beside
        return
    made = StoreServer(pool_bytes=POOL_BYTES)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def host(node: Node, opens: Opens) -> Iterator[RdmaHost]:
    assert isinstance(node, StoreServer)
    with attachable(node, opens) as made:
        yield made


@pytest.fixture
def connect(
    request: pytest.FixtureRequest, where: str, node: Node, opens: Opens
) -> Iterator[Connect]:
    if where != "beside":
        request.getfixturevalue("host")
    with contextlib.ExitStack() as made:

        def connect(transport: Any = "rdma", deadline_s: float = PATIENCE_S) -> StoreClient:
            url, rdma = url_of(node), Initiator(opens=opens)
            client = StoreClient(url, transport=transport, deadline_s=deadline_s, rdma=rdma)
            return made.enter_context(client)

        yield connect


@pytest.fixture
def bend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bend], None]:
    """Changes the copies of the next transfer, and of no other."""
    real = RemotePool.copies

    def bend(change: Bend) -> None:
        bends = [change]

        def bent(self: RemotePool, *arguments: Any) -> list[Copy]:
            copies = real(self, *arguments)
            return bends.pop()(copies) if bends else copies

        monkeypatch.setattr(RemotePool, "copies", bent)

    return bend


def all_right(client: StoreClient, hashes: bytes) -> bool:
    """Whether every block comes back as it must be."""
    blocks = len(hashes) // 32
    memory, span = Memory(blocks, BLOCK), range(blocks)
    statuses = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    right = Memory(blocks, BLOCK).holds(hashes).data
    return statuses == [BlockStatus.OK] * blocks and memory.data == right


def wrong_key(copies: list[Copy]) -> list[Copy]:
    """The last of them goes to memory that the key is not of."""
    return [*copies[:-1], copies[-1]._replace(rkey=copies[-1].rkey ^ 0x5500)]


def past_the_pool(copies: list[Copy]) -> list[Copy]:
    """The last of them goes beyond the pool's end."""
    past = copies[-1].remote_address + (1 << 30)
    return [*copies[:-1], copies[-1]._replace(remote_address=past)]


@anywhere
@pytest.mark.parametrize("change", [wrong_key, past_the_pool])
def test_a_transfer_that_the_node_refuses_is_done_again_on_another_connection(
    connect: Connect, node: Node, bend: Callable[[Bend], None], change: Bend
) -> None:
    client, hashes = connect(), chain_of(8)
    client.stats()
    before, counted = held(node), node.stats()
    bend(change)
    assert put_chain(client, MANIFEST, hashes) == 8
    bend(change)
    assert all_right(client, hashes)
    assert_gauges_return(node, before)
    stats = node.stats()
    assert stats["broken_attachments_total"] - counted["broken_attachments_total"] == 2
    assert stats["fenced_total"] - counted["fenced_total"] == 8
    assert eventually(lambda: node.stats()["queue_pairs"] == 1)


def test_memory_of_the_pool_that_is_not_registered_any_more_is_an_error_in_bounded_time(
    connect: Connect, node: Node, host: RdmaHost
) -> None:
    client = connect()
    client.stats()
    before = held(node)
    host.pools[0][0].close()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        put_chain(client, MANIFEST, chain_of(4))
    assert time.monotonic() - started < BOUND_S
    assert connect("tcp").match(MANIFEST, chain_of(4)).blocks == 0
    assert_gauges_return(node, {**before, "connections": 1})
    assert eventually(lambda: node.stats()["queue_pairs"] == 0)


def test_a_node_that_falls_silent_amid_a_put_does_not_hold_it_past_its_deadline(
    connect: Connect, node: Node, host: RdmaHost, bend: Callable[[Bend], None]
) -> None:
    client = connect(deadline_s=1.0)
    client.stats()

    def falls_silent(copies: list[Copy]) -> list[Copy]:
        for pair in tuple(host.queue_pairs.values()):
            pair.fence()
        return copies

    bend(falls_silent)
    started = time.monotonic()
    # It is noticed after some retries, and the put done again; or the deadline comes before that.
    with contextlib.suppress(DeadlineExceeded, StoreUnavailable):
        put_chain(client, MANIFEST, chain_of(4))
    assert time.monotonic() - started < BOUND_S
    assert eventually(lambda: node.stats()["reserved_blocks"] == 0)
    assert eventually(lambda: node.stats()["fenced_blocks"] == 0)
    later = connect()
    put_chain(later, MANIFEST, chain_of(4))
    assert all_right(later, chain_of(4))


def test_slots_of_a_put_that_failed_are_nobodys_until_its_queue_pair_has_ended(
    connect: Connect,
    node: Node,
    host: RdmaHost,
    bend: Callable[[Bend], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect()
    client.stats()
    ended: list[int] = []
    real = host.end
    monkeypatch.setattr(host, "end", ended.append)
    bend(wrong_key)
    assert put_chain(client, MANIFEST, chain_of(8)) == 8
    assert eventually(lambda: ended != [] and node.stats()["fenced_blocks"] == 8)
    # The pool has 64 blocks: eight are not to be had, and the others are right to the last byte.
    filler = chain_of(64, "filler")
    assert put_chain(client, MANIFEST, filler) == 56
    assert all_right(client, filler[: 56 * 32])
    assert node.stats()["fenced_blocks"] == 8
    for session in ended:
        real(session)
    assert node.stats()["fenced_blocks"] == 0


@anywhere
@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_client_killed_at_any_step_leaves_nothing(
    operation: str, where: str, connect: Connect, node: Node
) -> None:
    command = [sys.executable, "-m", "tests.fakes.doomed_client", url_of(node)]
    devices = "rdma" if where == "beside" else where
    whole, manifest = chain_of(doomed_client.BLOCKS), doomed_client.MANIFEST
    client = connect("tcp")
    client.register(manifest)
    if operation == "get":
        put_chain(client, manifest, whole)
    before = held(node)
    # Python starts slowly in an emulated machine: there it is killed amid the transfer alone.
    for step in range(STEPS) if "stand-in" in where else (AMID_THE_TRANSFER,):
        arguments = [*command, devices, operation, str(step)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as doomed:
            assert doomed.stdout is not None
            reached = doomed.stdout.readline()
            os.kill(doomed.pid, signal.SIGKILL)
        assert reached.startswith(f"step {step} ")
        assert ("during" in reached) == (step in {4, AMID_THE_TRANSFER})
        assert_gauges_return(node, before)
        assert eventually(lambda: node.stats()["queue_pairs"] == 0)
        if client.match(manifest, whole).blocks:
            assert all_right(client, whole)
            if operation == "put":
                client.purge()
    assert put_chain(client, manifest, whole) in {0, doomed_client.BLOCKS}
    assert all_right(client, whole)


def test_a_node_killed_amid_transfers_is_found_again(
    where: str, opens: Opens, tmp_path: Path
) -> None:
    with RdmaStore(tmp_path, where) as store:
        client = StoreClient(
            store.url, transport="rdma", deadline_s=PATIENCE_S / 2, rdma=Initiator(opens=opens)
        )
        stop, failed = threading.Event(), threading.Event()
        wrong: list[int] = []

        def traffic() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                hashes = chain_of(4, str(number % 9))
                started = time.monotonic()
                try:
                    put_chain(client, MANIFEST, hashes)
                    memory, span = Memory(4, BLOCK), range(4)
                    got = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
                    right = Memory(4, BLOCK).holds(hashes)
                    wrong.extend(
                        k for k in span if got[k] == BlockStatus.OK and memory[k] != right[k]
                    )
                except StoreUnavailable:
                    failed.set()
                    stop.wait(0.02)
                if time.monotonic() - started > BOUND_S + PATIENCE_S / 2:
                    wrong.append(-1)

        with client:
            put_chain(client, MANIFEST, chain_of(4, "first"))
            thread = threading.Thread(target=traffic)
            thread.start()
            try:
                store.kill()
                assert failed.wait(PATIENCE_S)
                store.start()
                hashes = chain_of(4, "after")
                assert eventually(lambda: _stored(client, hashes), PATIENCE_S)
            finally:
                stop.set()
                thread.join(PATIENCE_S)
            assert all_right(client, hashes)
            assert client.transport == "rdma"
            assert wrong == []


def _stored(client: StoreClient, hashes: bytes) -> bool:
    try:
        put_chain(client, MANIFEST, hashes)
        return client.match(MANIFEST, hashes).blocks == 4
    except StoreUnavailable:
        return False
