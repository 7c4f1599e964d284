"""A node on each of two machines over one InfiniStore, which is killed and comes back."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.fakes import store
from tests.fakes.infinistore import InfiniStore
from tests.fakes.patience import eventually
from tests.fakes.patient_store import TIER_TIMEOUT_S
from tests.fakes.store import chain_of
from tests.rdma.programs import begin, metric
from tests.rdma.rig import Control

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]
HERE, THERE = "10.77.0.1", "10.77.0.2"
CALL_S, PATIENCE_S = TIER_TIMEOUT_S, 240.0
BLOCKS, BLOCK_BYTES = 40, 64 << 10
MANIFEST = store.manifest_of(BLOCK_BYTES)
POOL = "4MiB"  # less than two chains
REMOTE = 2
Node = dict[str, str]


def put(node: Node, seed: str) -> None:
    with StoreClient(node["kv"], deadline_s=CALL_S) as client:
        store.put_chain(client, MANIFEST, chain_of(BLOCKS, seed))


def got(node: Node, seed: str) -> int:
    """How many leading blocks of a chain come out of the node. A wrong one fails the test."""
    chain, span = chain_of(BLOCKS, seed), range(BLOCKS)
    memory, right = (store.Memory(BLOCKS, BLOCK_BYTES) for _ in range(2))
    with StoreClient(node["kv"], deadline_s=2 * CALL_S) as client:
        statuses = client.get_into(MANIFEST, 0, chain, span, memory.segments, span)
    there = [status is BlockStatus.OK for status in statuses]
    blocks = there.index(False) if False in there else BLOCKS
    right.holds(chain)
    assert all(memory[k] == right[k] for k in range(blocks))
    return blocks


def are_up(*nodes: Node) -> bool:
    """Whether each of these nodes is connected to the tier."""
    return all(metric(node["http"], "kvstore:tier_up") for node in nodes)


def stored(node: Node) -> float:
    """Bytes that it has written to the tier."""
    return metric(node["http"], "kvstore:tier_bytes_total", operation="store")


@pytest.fixture(scope="module")
def nodes(infinistore: InfiniStore, hands: Callable[[], Control]) -> Iterator[tuple[Node, Node]]:
    """A node on this machine and one on the other, over the same server."""
    flags = ["--port", "0", "--http-port", "0", "--memory", POOL, "--rdma", "off"]
    flags += ["--tier", infinistore.url, "--tier-memory", "4MiB"]
    flags += ["--insecure", "--unix-socket", "none"]
    with ExitStack() as programs:
        link = hands()
        link.send(op="run", command=["patient-store", "--host", THERE, *flags])
        first = begin(programs, ["patient-store", "--host", HERE, *flags])
        second = link.receive()
        began = time.monotonic()
        assert eventually(lambda: are_up(first, second), PATIENCE_S), infinistore.log
        print(f"\ntwo nodes connected in {time.monotonic() - began:.1f} s")
        yield first, second


def test_blocks_written_by_one_node_and_evicted_there_are_read_through_the_other(
    nodes: tuple[Node, Node],
) -> None:
    first, second = nodes
    put(first, "a")
    assert eventually(lambda: stored(first) > BLOCKS * BLOCK_BYTES, PATIENCE_S)
    put(first, "b")
    put(first, "c")
    assert metric(first["http"], "kvstore:evictions_total", reason="capacity") >= BLOCKS
    with StoreClient(second["kv"], deadline_s=CALL_S) as client:
        match = client.match(MANIFEST, chain_of(BLOCKS))
    assert match.blocks == BLOCKS
    assert [place.tier for place in match.places] == [REMOTE]
    began = time.monotonic()
    assert got(second, "a") == BLOCKS
    print(f"\n{BLOCKS} blocks of 64 KiB through the other node: {time.monotonic() - began:.2f} s")
    assert got(first, "a") == BLOCKS


def test_a_killed_server_costs_hits_and_is_used_again_when_it_is_back(
    nodes: tuple[Node, Node], infinistore: InfiniStore
) -> None:
    first, second = nodes
    infinistore.kill()
    began = time.monotonic()
    assert got(first, "unknown") == got(second, "unknown") == 0
    assert time.monotonic() - began < CALL_S
    assert not are_up(first)
    assert not are_up(second)
    put(first, "while it is away")
    assert got(first, "while it is away") == BLOCKS
    infinistore.start()
    began = time.monotonic()
    assert eventually(lambda: are_up(first, second), PATIENCE_S), infinistore.log
    print(f"\nused again {time.monotonic() - began:.1f} s after its start")
    put(first, "d")
    assert eventually(lambda: got(second, "d") == BLOCKS, PATIENCE_S)
