"""The connection pool of a blocking client, one for each access to the node's memory.

Each operation takes a channel for itself: threads that operate at once have one each, up to a
limit.

Promises: a channel that comes free goes to a thread that can use it. There are two conditions
because some operations take no channel with leases: with one condition, `give` woke a thread that
could not use the channel, and another waited to its deadline beside a free one. What holds a
channel (a lease, a reservation) counts until its last request has ended, so that no wait gets in
between.
Tried: fewer checks on the way of shared memory. It saved 0.4 us of 4.8 a call and nothing of a
burst of 1 MiB blocks by four clients, and repeated the checks of dialer and channel.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from kvrouter_store.connection.channel import Channel
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import DeadlineExceeded, StoreClosed, StoreUnavailable

MAX_CHANNELS = 16


class ChannelPool:
    """Channels made by `connect`, each for one thread at a time. Safe in threads."""

    def __init__(self, connect: Callable[[Deadline], Channel]) -> None:
        self._connect = connect
        self._channels: list[Channel] = []
        self._lock = threading.RLock()
        # By `without_leases`: each wakes those that can use the same channels.
        self._changed = {picky: threading.Condition(self._lock) for picky in (False, True)}
        self._waiting = 0
        self._connecting = 0
        self._closed = False
        self._owner_pid = os.getpid()

    def take(
        self, deadline: Deadline, *, without_leases: bool = False, proven: bool = True
    ) -> Channel:
        """A channel for the calling thread alone, to be given back.

        `without_leases` asks for one on which nothing else waits to be released. One that is not
        `proven` may turn out to be broken when it is asked something, unless it maps the pool.
        Raises StoreUnavailable, StoreClosed.
        """
        while True:
            with self._lock:
                channel = self._idle(without_leases)
                if channel is None and len(self._channels) + self._connecting >= MAX_CHANNELS:
                    channel = self._wait_for_one(deadline, without_leases)
                    if channel is None:
                        continue
                if channel is None:
                    self._connecting += 1
            if channel is None:
                return self._open(deadline)
            unproven = not proven and channel.pool is None and not channel.broken
            if unproven or channel.alive():
                return channel
            channel.close()
            self.give(channel)

    def give(self, channel: Channel) -> None:
        """Give a channel back; a broken one is thrown away."""
        if channel.broken or channel.pending:
            with self._lock, contextlib.suppress(ValueError):
                self._channels.remove(channel)
            channel.discard()
        channel.lock.release()
        if self._waiting:  # a thread that is not counted yet finds this channel free
            with self._lock:
                self._wake()

    @contextlib.contextmanager
    def borrow(self, channel: Channel, deadline: Deadline) -> Iterator[Channel]:
        """This channel, once it is free. Raises StoreUnavailable."""
        if not channel.lock.acquire(timeout=deadline.left_s()):
            raise StoreUnavailable("the connection of the lease is busy")
        try:
            yield channel
        finally:
            self.give(channel)

    def channels(self) -> list[Channel]:
        """All channels, those in use too."""
        with self._lock:
            return list(self._channels)

    def close(self) -> None:
        """End every connection; threads that wait for one wake up and raise."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
            for changed in self._changed.values():
                changed.notify_all()
        for channel in channels:
            channel.close()
            if channel.lock.acquire(blocking=False):
                channel.discard()
                channel.lock.release()

    def _wait_for_one(self, deadline: Deadline, without_leases: bool) -> Channel | None:
        """One that came free before `give` could see that this thread waits; else None, later."""
        self._waiting += 1
        try:
            channel = self._idle(without_leases)
            if channel is None:
                self._changed[without_leases].wait(deadline.left_s())
        except DeadlineExceeded as error:
            busy = f"all {MAX_CHANNELS} connections of this client were busy until the deadline"
            raise StoreUnavailable(busy) from error
        finally:
            self._waiting -= 1
        return channel

    def _wake(self) -> None:
        """Have one thread of each kind look again: the one may not want what the other does."""
        for changed in self._changed.values():
            changed.notify()

    def _idle(self, without_leases: bool) -> Channel | None:
        if self._closed:
            raise StoreClosed("the store client is closed")
        if self._owner_pid != os.getpid():
            raise StoreClosed("the store client was made before a fork; make one in this process")
        for channel in self._channels:
            if channel.lock.acquire(blocking=False):
                if not (without_leases and channel.leases and channel.alive()):
                    return channel
                channel.lock.release()
        return None

    def _open(self, deadline: Deadline) -> Channel:
        try:
            channel = self._connect(deadline)
        except BaseException:
            with self._lock:
                self._connecting -= 1
                self._wake()
            raise
        channel.lock.acquire()
        with self._lock:
            self._connecting -= 1
            if not self._closed:
                self._channels.append(channel)
                return channel
        channel.discard()
        raise StoreClosed("the store client is closed")
