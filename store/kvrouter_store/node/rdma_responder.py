"""A store node's side of RDMA: its pool, registered once, and a queue pair for each connection.

Nothing is ever posted here: the clients' devices read and write the pool by themselves.
"""

import logging
import os
import select
import threading
from collections.abc import Sequence
from typing import Protocol

from kvrouter_store._core import AttachEvent, Status
from kvrouter_store.rdma.base import (
    Device,
    MemoryRegistration,
    QueuePair,
    RdmaEndpoint,
    RdmaUnavailable,
    Region,
    TransferFailed,
)
from kvrouter_store.rdma.cards import write_card

__all__ = ["AttachableNode", "Responder"]

log = logging.getLogger(__name__)


class AttachableNode(Protocol):
    """What lets its connections attach, as `kvrouter_store._core.StoreServer`."""

    @property
    def pool_address(self) -> int:
        """Where the pool lies in this process."""
        ...

    def stats(self) -> dict[str, int]:
        """Its gauges; pool_bytes among them."""
        ...

    def offer_attach(self, most: int) -> int:
        """Begin; a descriptor that can be read while there are events."""
        ...

    def take_attach_events(self) -> list[AttachEvent]:
        """What is to be done, each once."""
        ...

    def attached(self, session: int, card: bytes) -> bool:
        """The session has a queue pair. False: it is gone."""
        ...

    def refuse_attachment(self, session: int, status: Status, why: str) -> bool:
        """The session gets none."""
        ...

    def fenced(self, session: int) -> None:
        """Nothing reads or writes the pool through the session's queue pair any more."""
        ...


class Responder:
    """Makes and ends the queue pairs of a node's connections, in a thread of its own.

    `start`, then `close` before the node stops, whose pool is registered until then. Owns the
    devices. Connections take turns on them by what they say of their rail.
    """

    def __init__(self, node: AttachableNode, devices: Sequence[Device], most: int) -> None:
        self._node = node
        self._devices = list(devices)
        self._most = most
        self._pools: list[tuple[MemoryRegistration, Region]] = []
        self._pairs: dict[int, QueuePair] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Register the pool with each device (it takes a while), then let connections attach.

        Raises RdmaUnavailable where it may not be registered.
        """
        address, length = self._node.pool_address, self._node.stats()["pool_bytes"]
        for device in self._devices:
            pool = device.register(address, length, True)
            self._pools.append((pool, Region(address, length, pool.rkey)))
        events = self._node.offer_attach(self._most)
        self._thread = threading.Thread(
            target=self._run, args=(events,), name="kvstore-rdma", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End every queue pair, and with them their connections; close the devices."""
        if self._thread is not None:
            self._node.offer_attach(0)
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._thread = None
        for session in tuple(self._pairs):
            self._end(session)
        while self._pools:
            self._pools.pop()[0].close()
        while self._devices:
            self._devices.pop().close()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _run(self, events: int) -> None:
        waits = select.poll()
        for descriptor in (events, self._stop):
            waits.register(descriptor, select.POLLIN)
        while self._stop not in dict(waits.poll()):
            for event in self._node.take_attach_events():
                # What fails here leaves slots out of use, and must not leave others waiting.
                try:
                    self._begin(event) if event.begins else self._end(event.session)
                except Exception:
                    log.exception("a connection's queue pair could not be made or ended")

    def _begin(self, event: AttachEvent) -> None:
        place = event.rail % len(self._devices)
        try:
            peer = RdmaEndpoint.from_bytes(event.card)
        except ValueError as error:
            self._node.refuse_attachment(event.session, Status.BAD_REQUEST, str(error))
            return
        try:
            pair = self._devices[place].queue_pair()
        except RdmaUnavailable as error:
            self._node.refuse_attachment(event.session, Status.LIMIT, str(error))
            return
        try:
            pair.connect(peer)
        except TransferFailed as error:
            pair.close()
            self._node.refuse_attachment(event.session, Status.NOT_ALLOWED, str(error))
            return
        self._pairs[event.session] = pair
        # Where the session is gone already, its end comes as the next event.
        self._node.attached(event.session, write_card(pair.endpoint, self._pools[place][1]))

    def _end(self, session: int) -> None:
        pair = self._pairs.pop(session, None)
        if pair is not None:
            pair.close()
        self._node.fenced(session)
