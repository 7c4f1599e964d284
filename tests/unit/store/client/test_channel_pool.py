"""Which thread gets a connection that comes free: one that can use it, and at once."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
from tests.fakes.store import manifest_of

from kvrouter_store.client.channel_pool import MAX_CHANNELS, ChannelPool
from kvrouter_store.client.lease import Lease
from kvrouter_store.connection.channel import Channel, Registration
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreClosed, StoreUnavailable

PATIENCE_S = 20.0


class FakeChannel:
    """A connection that may have leases, and may have died unnoticed."""

    pool = None
    pending = False

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.leases = 0
        self.broken = self.dead = False

    @property
    def usable(self) -> bool:
        return not self.broken

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.broken = True

    discard = close


class Watched(Deadline):
    """Tells when somebody begins to wait under it."""

    def __init__(self) -> None:
        super().__init__(PATIENCE_S)
        self.waits = threading.Event()

    def left_s(self) -> float:
        self.waits.set()
        return super().left_s()


class Threads:
    """Takes channels of one full pool, each in a thread."""

    def __init__(self) -> None:
        self.pool = ChannelPool(lambda _: cast("Channel", FakeChannel()))
        self.busy = [self.pool.take(Deadline(PATIENCE_S)) for _ in range(MAX_CHANNELS)]
        self._threads = ThreadPoolExecutor(4)

    def take(self, **how: bool) -> Future[Channel]:
        """Begin to wait for a channel."""
        deadline = Watched()
        taken = self._threads.submit(self.pool.take, deadline, **how)
        assert deadline.waits.wait(PATIENCE_S)
        return taken

    def end(self) -> None:
        self.pool.close()
        self._threads.shutdown()


@pytest.fixture
def threads() -> Any:
    found = Threads()
    yield found
    found.end()


def test_a_leased_connection_that_comes_free_goes_to_who_can_use_it(threads: Threads) -> None:
    wait, get = threads.take(without_leases=True), threads.take()
    threads.busy[0].leases = 1
    threads.pool.give(threads.busy[0])
    assert get.result(PATIENCE_S) is threads.busy[0]
    assert not wait.done()


def test_every_connection_that_comes_free_ends_a_wait(threads: Threads) -> None:
    taken = [threads.take(without_leases=True), threads.take(), threads.take(without_leases=True)]
    for channel in threads.busy[:3]:
        threads.pool.give(channel)
    assert {each.result(PATIENCE_S) for each in taken} == set(threads.busy[:3])


def test_the_end_of_the_pool_ends_all_waits(threads: Threads) -> None:
    taken = [threads.take(), threads.take(without_leases=True)]
    threads.pool.close()
    for each in taken:
        with pytest.raises(StoreClosed):
            each.result(PATIENCE_S)


def test_leased_connections_that_have_died_make_room_for_a_wait(threads: Threads) -> None:
    for channel in threads.busy:
        channel.leases = 1
        cast("FakeChannel", channel).dead = True
        threads.pool.give(channel)
    fresh = threads.pool.take(Deadline(PATIENCE_S), without_leases=True)
    assert fresh not in threads.busy


def test_a_lease_counts_until_its_release_has_the_connection() -> None:
    """Else a long wait could take the connection, and the release would wait for its end."""
    pool = ChannelPool(lambda _: cast("Channel", FakeChannel()))
    channel = pool.take(Deadline(PATIENCE_S))
    channel.leases, asked = 1, []

    class Busy:
        def borrow(self, channel: Channel, _: Deadline) -> None:
            asked.append(channel.leases)
            raise StoreUnavailable("the connection of the lease is busy")

    client = cast("Any", type("Client", (), {"deadline_s": PATIENCE_S}))
    executor = cast("Any", Busy())
    known, hashes = Registration(1, 1, 1, (1,)), b""
    owner = client, executor, channel, manifest_of(64), hashes
    lease = Lease(*owner, blocks=1, held=7, known=known)
    assert lease.release() is False
    assert asked == [channel.leases] == [2]
