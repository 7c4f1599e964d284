"""What stands behind a blocking client: the way to the node, its connections, and one retry."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvrouter_store._core import TlsContext
from kvrouter_store.client.channel_pool import ChannelPool
from kvrouter_store.client.circuit import Circuit, CircuitPass
from kvrouter_store.client.manifest_ids import ManifestIds
from kvrouter_store.client.transport_choice import TransportChoice, TransportName, Way
from kvrouter_store.connection.address import Address
from kvrouter_store.connection.channel import Access, Channel, Deadline, LinkLost
from kvrouter_store.connection.tls_channel import open_channel
from kvrouter_store.errors import (
    DeadlineExceeded,
    StoreClosed,
    StoreRefused,
    StoreUnavailable,
    UnknownManifest,
)
from kvrouter_store.rdma.initiator import Initiator

__all__ = ["Executor"]

log = logging.getLogger(__name__)
T = TypeVar("T")
PROBE_S = 0.25
"""How long a node that did not answer in time may take to greet a new connection."""


class Executor:
    """Runs actions on connections to one node, whichever life of it. Safe in threads."""

    def __init__(
        self,
        address: Address,
        wish: TransportName,
        name: str,
        token: str,
        tls: TlsContext | None = None,
        *,
        rdma: Initiator,
    ) -> None:
        self._rdma = rdma
        if wish == "rdma":
            rdma.open()  # who demands it hears at once that it cannot be had here
        self.route = TransportChoice(address, wish, name, token, tls, rdma=rdma)
        self.registry = ManifestIds()
        self._name = name
        self._token = token
        self._tls = tls
        self._told_of_digests = False
        self._circuit = Circuit()
        self._lock = threading.Lock()
        self._lanes = {
            access: ChannelPool(functools.partial(self._connect, access)) for access in Access
        }

    def operate(
        self,
        access: Access,
        deadline: Deadline,
        action: Callable[[Channel], T],
        *,
        without_leases: bool = False,
    ) -> T:
        """Run `action` on a connection with that access to the pool (none needed without a pool).

        A link that turns out broken and a node that has forgotten the manifest are met by one more
        try, on a link that was looked at before: every action may be done twice.
        """
        try:
            return self._try(access, deadline, action, without_leases, proven=False)
        except UnknownManifest:
            self.registry.forget_ids()
        except LinkLost:
            deadline.left_s()
        return self._try(access, deadline, action, without_leases, proven=True)

    def lane_of(self, channel: Channel) -> ChannelPool:
        """The lane that the channel belongs to."""
        for lane in self._lanes.values():
            if lane.owns(channel):
                return lane
        raise StoreClosed("the store client was closed")

    def close(self) -> None:
        """End every connection."""
        for lane in self._lanes.values():
            lane.close()
        self._rdma.close()

    def _try(
        self,
        access: Access,
        deadline: Deadline,
        action: Callable[[Channel], T],
        without_leases: bool,
        *,
        proven: bool,
    ) -> T:
        self._pass_circuit(deadline)
        try:
            way = self.route.find(deadline)
            lane = self._lanes[access if way.kind == "shm" else Access.NONE]
            channel = lane.take(deadline, without_leases=without_leases, proven=proven)
            try:
                return action(channel)
            except UnknownManifest:
                channel.announced.clear()
                raise
            finally:
                lane.give(channel)
        except DeadlineExceeded:
            self._timed_out()
            raise

    def _timed_out(self) -> None:
        """The node did not answer in time: later operations fail at once until it does."""
        with self._lock:
            self._circuit.timed_out(time.monotonic())

    def _pass_circuit(self, deadline: Deadline) -> None:
        """Return where the node may be asked; probe it first where a probe is due.

        Raises StoreUnavailable, within PROBE_S.
        """
        if not self._circuit.is_open:
            return
        with self._lock:
            now = time.monotonic()
            admission = self._circuit.admit(now)
            pause_s = self._circuit.remaining_s(now)
        if admission is CircuitPass.REFUSE:
            raise StoreUnavailable(f"the store did not answer; next try in {pause_s:.2f} s")
        if admission is CircuitPass.PROBE:
            self._probe(deadline)

    def _probe(self, deadline: Deadline) -> None:
        answered = False
        try:
            limit = Deadline(min(PROBE_S, deadline.left_s()))
            address = self.route.find(limit).address
            open_channel(
                address, limit, name=self._name, token=self._token, tls=self._tls
            ).discard()
            answered = True
        except StoreRefused:
            answered = True
            raise
        finally:
            with self._lock:
                self._circuit.probed(time.monotonic(), answered=answered)

    def _connect(self, access: Access, deadline: Deadline) -> Channel:
        """Connect along the known way; where it leads nowhere any more, look for another, once."""
        way = self.route.find(deadline)
        try:
            channel = self._channel(way, deadline, access)
        except DeadlineExceeded:
            raise
        except StoreUnavailable:
            self.route.forget(way)
            way = self.route.find(deadline)
            access = access if way.kind == "shm" else Access.NONE
            channel = self._channel(way, deadline, access)
        try:
            self.registry.announce_all(channel, deadline)
        except BaseException:
            channel.discard()
            raise
        return channel

    def _channel(self, way: Way, deadline: Deadline, access: Access) -> Channel:
        channel = open_channel(
            way.address,
            deadline,
            name=self._name,
            token=self._token,
            tls=self._tls,
            access=access,
        )
        self._tell_of_digests(channel)
        if way.kind == "rdma":
            try:
                self.route.attach(channel, deadline)
            except BaseException:
                channel.discard()
                raise
        return channel

    def _tell_of_digests(self, channel: Channel) -> None:
        with self._lock:
            told, self._told_of_digests = self._told_of_digests, not channel.hello.digests
        if self._told_of_digests and not told:
            log.info("the store has digests off: nothing that is read from it is checked")
