"""The control link cut in the middle of things: what the client might still write stays fenced."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreUnavailable

BIG = 3 << 20  # of a pool of 4 MiB: two do not fit
BLOCK = 64 << 10
WHOLE = manifest_of(BIG)
MANIFEST = manifest_of(BLOCK)
OURS, THEIRS = chain_of(1, "ours"), chain_of(1, "theirs")


@pytest.fixture
def link(server: StoreServer) -> Iterator[Link]:
    assert server.unix_path is not None
    with Link(server.unix_path) as link:
        yield link


def test_a_slot_is_not_reused_while_a_cut_off_writer_can_reach_it(
    server: StoreServer, url: str, link: Link
) -> None:
    with StoreClient(link.url, transport="shm") as ours, StoreClient(url) as theirs:
        theirs.register(WHOLE)
        before = held(server)
        wrong = Memory(1, BIG)
        reservation = ours.reserve(WHOLE, 0, OURS, range(1))
        copying, enough = threading.Event(), threading.Event()

        def copy_on() -> None:
            while not enough.is_set():
                reservation.fill(wrong.segments, [0])
                copying.set()

        thread = threading.Thread(target=copy_on)
        thread.start()
        assert copying.wait(10)
        link.cut()
        assert eventually(lambda: server.stats()["fenced_blocks"] == 1)
        assert put_chain(theirs, WHOLE, THEIRS) == 0  # wanted at once: there is no other room
        assert server.stats()["fenced_blocks"] == 1

        enough.set()
        thread.join(10)
        with pytest.raises(StoreUnavailable):
            reservation.commit([0])
        assert eventually(lambda: server.stats()["fenced_blocks"] == 0)
        assert put_chain(theirs, WHOLE, THEIRS) == 1
        memory = Memory(1, BIG)
        got = theirs.get_into(WHOLE, 0, THEIRS, range(1), memory.segments, [0])
        assert got == [BlockStatus.OK]
        assert memory.data == Memory(1, BIG).holds(THEIRS).data
        assert theirs.match(WHOLE, OURS).blocks == 0
    assert server.stats()["reserved_blocks"] == 0
    assert before["fenced_blocks"] == 0


def test_a_copy_that_outlasts_its_link_keeps_the_fence_until_it_ends(
    server: StoreServer, url: str, link: Link
) -> None:
    """The client notices the cut (another thread closes the mapping) while a copy still runs."""
    with StoreClient(link.url, transport="shm") as ours, StoreClient(url) as theirs:
        theirs.register(WHOLE)
        reservation = ours.reserve(WHOLE, 0, OURS, range(1))
        memory = Memory(1, BIG)
        failures: list[BaseException] = []
        copies = 0
        copying = threading.Event()

        def copy_until_told() -> None:
            nonlocal copies
            try:
                while True:
                    reservation.fill(memory.segments, [0])
                    copies += 1
                    copying.set()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=copy_until_told)
        thread.start()
        assert copying.wait(10)
        ours.close()
        thread.join(10)
        assert not thread.is_alive()
        assert len(failures) == 1
        assert eventually(lambda: server.stats()["reserved_blocks"] == 0)
        assert eventually(lambda: server.stats()["fenced_blocks"] == 0)  # seen in a later turn
        assert put_chain(theirs, WHOLE, THEIRS) == 1


@pytest.mark.parametrize(("transport", "lend_bytes"), [("shm", 0), ("shm", 1 << 20), ("unix", 0)])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_put_cut_after_any_number_of_bytes_leaves_whole_blocks_only(
    server: StoreServer,
    url: str,
    transport: Literal["shm", "unix"],
    direction: str,
    lend_bytes: int,
) -> None:
    hashes = chain_of(4)
    assert server.unix_path is not None
    with StoreClient(url, transport="tcp") as witness:
        witness.register(MANIFEST)
        before = held(server)
        for limit in (1, 40, 100, 200, 400, 700, 900, 1500, 70_000, 200_000):
            with Link(server.unix_path) as link:
                link.cut_after_up = limit if direction == "up" else None
                link.cut_after_down = limit if direction == "down" else None
                with StoreClient(link.url, transport=transport, deadline_s=5) as client:
                    _put_as_far_as_it_goes(client, hashes)
            assert_gauges_return(server, before)
            whole = witness.match(MANIFEST, hashes).blocks
            assert transport == "unix" or lend_bytes or whole in (0, 4)
            assert_right(witness, hashes, whole)
            assert put_chain(witness, MANIFEST, hashes) == 4 - whole
            assert_right(witness, hashes, 4)
            witness.purge()


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_a_get_cut_after_any_number_of_bytes_gives_no_wrong_block(
    server: StoreServer, url: str, transport: Literal["shm", "unix"]
) -> None:
    hashes = chain_of(4)
    assert server.unix_path is not None
    right = Memory(4, BLOCK).holds(hashes)
    with StoreClient(url, transport="tcp") as witness:
        put_chain(witness, MANIFEST, hashes)
        before = held(server)
        for limit in (1, 40, 150, 250, 400, 600, 1000, 70_000, 200_000):
            with Link(server.unix_path) as link:
                link.cut_after_down = limit
                with StoreClient(link.url, transport=transport, deadline_s=5) as client:
                    memory = Memory(4, BLOCK)
                    try:
                        got = client.get_into(
                            MANIFEST, 0, hashes, range(4), memory.segments, range(4)
                        )
                    except StoreUnavailable:
                        continue
                    assert got == [BlockStatus.OK] * 4
                    assert memory.data == right.data
            assert_gauges_return(server, before)
        assert_gauges_return(server, before)


def assert_right(client: StoreClient, hashes: bytes, blocks: int) -> None:
    memory, right = Memory(4, BLOCK), Memory(4, BLOCK).holds(hashes)
    span = range(blocks)
    got = client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
    assert got == [BlockStatus.OK] * blocks
    assert memory.data[: blocks * BLOCK] == right.data[: blocks * BLOCK]


def _put_as_far_as_it_goes(client: StoreClient, hashes: bytes) -> None:
    with contextlib.suppress(StoreUnavailable):
        put_chain(client, MANIFEST, hashes)
