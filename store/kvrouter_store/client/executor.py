"""Runs the operations of a blocking client on its connections, with one retry."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvrouter_store.client.channel_pool import ChannelPool
from kvrouter_store.client.dialer import Dialer
from kvrouter_store.client.manifest_ids import ManifestIds
from kvrouter_store.connection.channel import Access, Channel, LinkLost
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.reconnect import Circuit
from kvrouter_store.errors import (
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    UnknownManifest,
)

T = TypeVar("T")
PROBE_S = 0.25
"""How long the handshake of a probe may take."""


class Executor:
    """Runs actions on connections to one node, also after a restart of it. Safe in threads."""

    def __init__(self, dialer: Dialer, manifest_ids: ManifestIds) -> None:
        self._dialer = dialer
        self._manifest_ids = manifest_ids
        self._circuit = Circuit()
        self._lock = threading.Lock()
        self._pools = {
            access: ChannelPool(functools.partial(dialer.open, access)) for access in Access
        }

    def run(
        self,
        access: Access,
        deadline: Deadline,
        action: Callable[[Channel], T],
        *,
        without_leases: bool = False,
    ) -> T:
        """Run `action` on a connection with that access to the pool (if it can be mapped).

        After a broken link, and where the node does not know the manifest any more, it runs once
        more, on a link that was checked before: every action may be done twice.
        """
        try:
            return self._try(access, deadline, action, without_leases, proven=False)
        except UnknownManifest:
            self._manifest_ids.forget_ids()
        except LinkLost:
            deadline.left_s()
        return self._try(access, deadline, action, without_leases, proven=True)

    def borrow(
        self, channel: Channel, deadline: Deadline
    ) -> contextlib.AbstractContextManager[Channel]:
        """The very channel that a lease is bound to, once it is free. Raises StoreUnavailable."""
        for pool in self._pools.values():
            if channel in pool.channels():
                return pool.borrow(channel, deadline)
        raise LinkLost("the connection of the lease was given up")

    def channels(self) -> list[Channel]:
        """All connections."""
        return [channel for pool in self._pools.values() for channel in pool.channels()]

    def close(self) -> None:
        """End every connection."""
        for pool in self._pools.values():
            pool.close()
        self._dialer.close()

    def _try(
        self,
        access: Access,
        deadline: Deadline,
        action: Callable[[Channel], T],
        without_leases: bool,
        *,
        proven: bool,
    ) -> T:
        if self._circuit.is_open:
            self._check_circuit(deadline)
        try:
            shared = self._dialer.choose(deadline).kind == "shm"
            pool = self._pools[access if shared else Access.NONE]
            channel = pool.take(deadline, without_leases=without_leases, proven=proven)
            try:
                return action(channel)
            except UnknownManifest:
                channel.announced.clear()
                raise
            finally:
                pool.give(channel)
        except DeadlineExceeded:
            with self._lock:
                self._circuit.timed_out(time.monotonic())
            raise

    def _check_circuit(self, deadline: Deadline) -> None:
        """Return where the node may be asked; probe it first where a probe is due.

        Raises StoreUnavailable, within PROBE_S.
        """
        with self._lock:
            if not self._circuit.is_open:  # a probe was answered just now
                return
            now = time.monotonic()
            if not self._circuit.may_probe(now):
                pause_s = self._circuit.remaining_s(now)
                raise StoreUnavailable(f"the store did not answer; next try in {pause_s:.2f} s")
        self._probe(deadline)

    def _probe(self, deadline: Deadline) -> None:
        answered = False
        try:
            self._dialer.probe(Deadline(min(PROBE_S, deadline.left_s())))
            answered = True
        except StoreRefused:
            answered = True
            raise
        finally:
            with self._lock:
                self._circuit.probed(time.monotonic(), answered=answered)
