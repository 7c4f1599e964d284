"""Blocks that clients on the same host put without asking the server."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.fakes.raw import RawLink
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, LendReply, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.channel import Channel
from kvrouter_store.errors import StoreRefused

BLOCK = 64 << 10
POOL_BLOCKS = 64
LENT = 8
MANIFEST = manifest_of(BLOCK)
STORED, EXISTS, OK = BlockStatus.STORED, BlockStatus.EXISTS, BlockStatus.OK
Connect = Callable[..., StoreClient]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A node for 64 blocks that lends eight slots to each client."""
    node = StoreServer(
        unix_path=str(tmp_path / "s.sock"),
        pool_bytes=POOL_BLOCKS * BLOCK,
        lend_bytes=LENT * BLOCK,
        reserve_bytes=POOL_BLOCKS * BLOCK,  # the clients of this process are one client
    )
    node.start()
    yield node
    node.stop()


def put(client: StoreClient, hashes: bytes) -> tuple[BlockStatus, ...]:
    """Put a chain with its own bytes."""
    span = range(len(hashes) // 32)
    memory = Memory(len(span), BLOCK).holds(hashes)
    return client.put(MANIFEST, 0, hashes, span, memory.segments, span).statuses


def has_right(client: StoreClient, hashes: bytes) -> bool:
    """Whether the node has all of the chain, with its own bytes."""
    span = range(len(hashes) // 32)
    memory, right = Memory(len(span), BLOCK), Memory(len(span), BLOCK).holds(hashes)
    got = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    return got == [OK] * len(span) and memory.data == right.data


def requests_of(server: StoreServer, *operations: str) -> int:
    stats = server.stats()
    return sum(stats[f"operation_ns.{name}.le_inf"] for name in operations)


def test_puts_ask_the_server_for_slots_alone(client: StoreClient, server: StoreServer) -> None:
    for number in range(2 * LENT):
        assert put(client, chain_of(1, str(number))) == (STORED,)
    assert requests_of(server, "lend") == 2
    assert requests_of(server, "reserve", "commit", "put") == 0
    stats = server.stats()
    assert stats["posts_total.stored"] == stats["commits_total"] == 2 * LENT
    assert stats["bytes_in_total.shm"] == 2 * LENT * BLOCK


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_what_was_put_is_there_for_everybody_at_once(connect: Connect, transport: str) -> None:
    writer, reader = connect("shm"), connect(transport)
    reader.register(MANIFEST)
    for number in range(3 * LENT):
        chain = chain_of(1 + number % 3, str(number))
        assert set(put(writer, chain)) == {STORED}
        assert has_right(reader, chain)


def test_what_is_there_is_told_and_not_written_again(
    client: StoreClient, connect: Connect, server: StoreServer
) -> None:
    chain = chain_of(2)
    assert put(client, chain) == (STORED, STORED)
    assert put(client, chain) == (EXISTS, EXISTS)  # the server has not looked yet
    server.stats()
    assert put(client, chain) == (EXISTS, EXISTS)
    assert put(connect(), chain) == (EXISTS, EXISTS)
    assert server.stats()["posts_total.exists"] == 0


def test_two_who_put_the_same_at_once_store_it_once(connect: Connect, server: StoreServer) -> None:
    clients = [connect("shm") for _ in range(2)]
    chains = [chain_of(4, str(number)) for number in range(200)]
    both = threading.Barrier(2)

    def run(client: StoreClient) -> None:
        for chain in chains[:10]:
            both.wait(20)
            put(client, chain)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(has_right(clients[0], chain) for chain in chains[:10])
    stats = server.stats()
    assert stats["commits_total"] == stats["blocks"] == 40
    assert stats["used_bytes"] == 40 * BLOCK


def test_a_whole_block_takes_the_place_of_one_that_is_being_written(
    connect: Connect, server: StoreServer
) -> None:
    slow, quick = connect("shm"), connect("shm")
    chain = chain_of(1)
    with slow.reserve(MANIFEST, 0, chain, range(1)) as reservation:
        assert put(quick, chain) == (STORED,)
        assert has_right(quick, chain)
        wrong = reservation.fill(Memory(1, BLOCK).segments, [0])
        assert reservation.commit(wrong) == [OK]
    assert has_right(quick, chain)
    stats = server.stats()
    assert (stats["blocks"], stats["reserved_blocks"], stats["used_bytes"]) == (1, 0, BLOCK)


def test_who_waits_hears_of_a_block_at_once(connect: Connect, server: StoreServer) -> None:
    writer, waiter = connect("shm"), connect("tcp")
    chain = chain_of(3)
    put(writer, chain[:32])
    landings: list[int] = []
    thread = threading.Thread(
        target=lambda: landings.append(waiter.wait(MANIFEST, chain, 3, 20).blocks)
    )
    thread.start()
    assert eventually(lambda: server.stats()["waits"] == 1)
    put(writer, chain)
    thread.join(10)
    assert landings == [3]


@pytest.mark.parametrize("somebody_waits", [False, True])
def test_a_chain_is_not_evicted_for_slots_for_its_own_end(
    client: StoreClient, server: StoreServer, somebody_waits: bool
) -> None:
    """A pool that holds nothing else: what does not fit is refused, and what it has stays."""
    if somebody_waits:
        link = RawLink(str(server.unix_path))
        manifest_id = link.register(MANIFEST)
        awaited = manifest_id, chain_of(1, "never"), 1, 600_000, False
        link.send(_core.encode_wait(link.next_id(), *awaited))
        assert eventually(lambda: server.stats()["waits"] == 1)
    chain = chain_of(POOL_BLOCKS + 1)
    for block in range(POOL_BLOCKS + 1):
        span, memory = range(block, block + 1), Memory(1, BLOCK)
        name = chain[: (block + 1) * 32], span
        status = client.put(MANIFEST, 0, *name, memory.segments, [0]).statuses
        assert status == ((STORED,) if block < POOL_BLOCKS else (BlockStatus.NO_SPACE,))
    assert client.match(MANIFEST, chain).blocks == POOL_BLOCKS
    if somebody_waits:
        link.close()


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_what_is_no_chain_is_refused(connect: Connect, transport: str) -> None:
    client = connect(transport)
    put(client, chain_of(1))
    twice = chain_of(1) * 2
    for hashes, span in ((bytes(32), range(1)), (twice, range(1, 2)), (twice, range(2))):
        memory = Memory(len(span), BLOCK)
        with pytest.raises(StoreRefused, match="not a chain"):
            client.put(MANIFEST, 0, hashes, span, memory.segments, range(len(span)))


def test_slots_whose_loan_may_have_ended_are_not_written(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler that raises just after the server has given them to others."""
    ours, theirs = connect("shm"), connect("shm")
    put(ours, chain_of(1))
    large, ask = manifest_of(4 * BLOCK), Channel.ask

    def interrupted(*arguments: Any) -> Any:
        answer = ask(*arguments)
        if isinstance(answer, LendReply):
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(Channel, "ask", interrupted)
    memory = Memory(1, 4 * BLOCK)
    with pytest.raises(KeyboardInterrupt):
        ours.put(large, 0, chain_of(1, "large"), range(1), memory.segments, [0])
    monkeypatch.undo()
    chains = [chain_of(1, str(number)) for number in range(40)]
    for chain in chains[:30]:
        put(theirs, chain)
    for chain in chains[30:]:
        put(ours, chain)
    assert all(has_right(theirs, chain) for chain in chains)


def test_slots_of_another_size_are_given_back(client: StoreClient, server: StoreServer) -> None:
    large = manifest_of(4 * BLOCK)
    memory = Memory(1, 4 * BLOCK)
    for number in range(4):
        put(client, chain_of(1, str(number)))
        client.put(large, 0, chain_of(1, str(number)), range(1), memory.segments, [0])
        stats = server.stats()
        assert stats["lent_bytes"] == LENT * BLOCK - 4 * BLOCK
    assert server.stats()["commits_total"] == 8


def test_more_than_the_server_lends_is_reserved(client: StoreClient, server: StoreServer) -> None:
    chain = chain_of(2 * LENT)
    for _ in range(2):
        put_chain(client, MANIFEST, chain)
        assert has_right(client, chain)
        client.purge()
    assert requests_of(server, "reserve") == 2


def test_all_that_was_lent_comes_back_when_clients_go(
    connect: Connect, server: StoreServer
) -> None:
    clients = [connect("shm") for _ in range(5)]
    for number, client in enumerate(clients):
        put(client, chain_of(1, str(number)))
    # Four times what each may have is what all may have.
    assert server.stats()["lent_bytes"] == (4 * LENT - 1) * BLOCK
    for client in clients:
        client.close()
    assert eventually(lambda: server.stats()["fenced_blocks"] == server.stats()["lent_bytes"] == 0)
    assert server.stats()["used_bytes"] == 5 * BLOCK


def test_puts_go_on_with_a_node_that_was_killed_and_came_back(tmp_path: Path) -> None:
    with StoreProcess(tmp_path, "64MiB") as node:
        client = StoreClient(node.url, transport="shm")
        assert put(client, chain_of(1)) == (STORED,)
        node.kill()
        node.start()
        assert put(client, chain_of(2)) == (STORED, STORED)
        assert has_right(client, chain_of(2))
        client.close()
