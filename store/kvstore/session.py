"""What stands behind a blocking client: the way to the node, its connections, and one retry."""

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore._core import TlsContext
from kvstore.address import Address
from kvstore.answers import Registration
from kvstore.block import Manifest
from kvstore.circuit import Admission, Circuit
from kvstore.connection import Access, Channel, Deadline, LinkLost, PutDigests
from kvstore.errors import (
    DeadlineExceeded,
    StoreClosed,
    StoreRefused,
    StoreUnavailable,
    UnknownManifest,
)
from kvstore.lane import Lane
from kvstore.rdma.initiator import Initiator
from kvstore.registry import Registry
from kvstore.route import Route, TransportName, Way
from kvstore.shortcut import Shortcut
from kvstore.tls_channel import open_channel

__all__ = ["Session"]

T = TypeVar("T")
PROBE_S = 0.25
"""How long a node that did not answer in time may take to greet a new connection."""


class Session:
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
        puts: PutDigests = PutDigests.CHECKED,
    ) -> None:
        self._rdma = rdma
        if wish == "rdma":
            rdma.open()  # who demands it hears at once that it cannot be had here
        self.route = Route(address, wish, name, token, tls, rdma=rdma)
        self.registry = Registry()
        self._name = name
        self._token = token
        self._tls = tls
        self._digests = puts
        self._circuit = Circuit()
        self._circuit_lock = threading.Lock()
        self._lanes = {access: Lane(functools.partial(self._connect, access)) for access in Access}
        self.puts, self.reads = Shortcut(self._timed_out), Shortcut(self._timed_out)

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

    def went_well(
        self, access: Access, channel: Channel, manifest: Manifest, known: Registration
    ) -> None:
        """The channel, locked by the caller, did what was asked of the manifest's blocks."""
        if channel.remote is not None:
            return
        if channel.pool is None:  # it serves both
            lane, learners = self._lanes[Access.NONE], [self.puts, self.reads]
        else:
            lane, learners = (
                self._lanes[access],
                [self.puts if access == Access.WRITE else self.reads],
            )
        for shortcut in learners:
            shortcut.learn(lane, channel, manifest, known)

    def lane_of(self, channel: Channel) -> Lane:
        """The lane that the channel belongs to."""
        for lane in self._lanes.values():
            if lane.owns(channel):
                return lane
        raise StoreClosed("the store client was closed")

    def close(self) -> None:
        """End every connection."""
        self._forget_shortcuts()
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
        with self._circuit_lock:
            self._circuit.timed_out(time.monotonic())
        self._forget_shortcuts()

    def _pass_circuit(self, deadline: Deadline) -> None:
        """Return where the node may be asked; probe it first where a probe is due.

        Raises StoreUnavailable, within PROBE_S.
        """
        with self._circuit_lock:
            now = time.monotonic()
            admission = self._circuit.admit(now)
            pause_s = self._circuit.remaining_s(now)
        if admission is Admission.REFUSE:
            raise StoreUnavailable(f"the store did not answer; next try in {pause_s:.2f} s")
        if admission is Admission.PROBE:
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
            with self._circuit_lock:
                self._circuit.probed(time.monotonic(), answered=answered)

    def _forget_shortcuts(self) -> None:
        self.puts.forget()
        self.reads.forget()

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
            puts=self._digests,
        )
        if way.kind == "rdma":
            try:
                self.route.attach(channel, deadline)
            except BaseException:
                channel.discard()
                raise
        return channel
