"""A store node's side of RDMA: its pool, registered once, and a queue pair for each connection.

The node posts nothing: the clients' devices read and write the pool by themselves.
"""

import logging
import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvrouter_store._core import AttachEvent, Status, StoreServer
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, TenantToken
from kvrouter_store.rdma.base import (
    Device,
    MemoryRegistration,
    QueuePair,
    RdmaEndpoint,
    RdmaUnavailable,
    Region,
    TransferFailed,
    write_card,
)
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Opens

log = logging.getLogger(__name__)


@contextmanager
def serving_rdma(
    server: StoreServer,
    settings: StoreSettings,
    tenants: Sequence[TenantToken],
    opens: Opens = open_device,
) -> Iterator[str]:
    """Let the connections of a started node attach until this ends.

    With --rdma auto it yields the reason why there is no RDMA, else ""; with --rdma on the reason
    is a StartRefused.
    """
    no_rdma = ""
    with ExitStack() as stack:
        try:
            if settings.rdma != "off":
                _offer(stack, server, settings, tenants, opens)
        except RdmaUnavailable as problem:
            stack.close()
            if settings.rdma == "on":
                raise StartRefused(f"--rdma on: {problem}") from None
            no_rdma = str(problem)
        yield no_rdma


def _offer(
    stack: ExitStack,
    server: StoreServer,
    settings: StoreSettings,
    tenants: Sequence[TenantToken],
    opens: Opens,
) -> None:
    if len(tenants) > 1:
        raise RdmaUnavailable(
            "a client with RDMA reaches the whole pool, and this node has several tenants: run one "
            "for each"
        )
    if settings.tls_cert_file and settings.rdma != "on":
        raise RdmaUnavailable("RDMA would carry KV beside TLS, unencrypted: --rdma on allows it")
    options = settings.rdma_options
    devices: list[Device] = []
    with ExitStack() as opened:
        for rail in range(max(1, len(options.devices()))):
            devices.append(opens(options, rail))
            opened.callback(devices[-1].close)
        opened.pop_all()
    host = RdmaHost(server, devices, settings.rdma_connections)
    stack.callback(host.close)
    host.start()


class RdmaHost:
    """Makes and ends the queue pairs of a node's connections, in a thread of its own.

    `start`, then `close` before the node stops, whose pool is registered until then. Owns the
    devices; connections take turns on them by the rail that they name. `pools` are the pool's
    registrations, one for each device, `queue_pairs` those of the sessions that have one.
    """

    def __init__(self, server: StoreServer, devices: Sequence[Device], most: int) -> None:
        self.pools: list[tuple[MemoryRegistration, Region]] = []
        self.queue_pairs: dict[int, QueuePair] = {}
        self._server = server
        self._devices = list(devices)
        self._most = most
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Register the pool with each device (it takes a while), then let connections attach.

        Raises RdmaUnavailable where it may not be registered.
        """
        address, length = self._server.pool_address, self._server.stats()["pool_bytes"]
        for device in self._devices:
            pool = device.register(address, length, True)
            self.pools.append((pool, Region(address, length, pool.rkey)))
        events = self._server.offer_attach(self._most)
        self._thread = threading.Thread(
            target=self._run, args=(events,), name="kvstore-rdma", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End every queue pair, and with them their connections; close the devices."""
        if self._thread is not None:
            self._server.offer_attach(0)
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._thread = None
        for session in tuple(self.queue_pairs):
            self.end(session)
        while self.pools:
            self.pools.pop()[0].close()
        while self._devices:
            self._devices.pop().close()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def end(self, session: int) -> None:
        """End the session's queue pair: its slots are then free."""
        pair = self.queue_pairs.pop(session, None)
        if pair is not None:
            pair.close()
        self._server.fenced(session)

    def _run(self, events: int) -> None:
        waits = select.poll()
        for descriptor in (events, self._stop):
            waits.register(descriptor, select.POLLIN)
        while self._stop not in dict(waits.poll()):
            for event in self._server.take_attach_events():
                # A failure here leaves slots out of use, but must not stop the other connections.
                try:
                    self._begin(event) if event.begins else self.end(event.session)
                except Exception:
                    log.exception("a connection's queue pair could not be made or ended")

    def _begin(self, event: AttachEvent) -> None:
        place = event.rail % len(self._devices)
        try:
            peer = RdmaEndpoint.from_bytes(event.card)
        except ValueError as error:
            self._server.refuse_attachment(event.session, Status.BAD_REQUEST, str(error))
            return
        try:
            pair = self._devices[place].queue_pair()
        except RdmaUnavailable as error:
            self._server.refuse_attachment(event.session, Status.LIMIT, str(error))
            return
        try:
            pair.connect(peer)
        except TransferFailed as error:
            pair.close()
            self._server.refuse_attachment(event.session, Status.NOT_ALLOWED, str(error))
            return
        self.queue_pairs[event.session] = pair
        # If the session has ended meanwhile, its end comes as the next event.
        self._server.attached(event.session, write_card(pair.endpoint, self.pools[place][1]))
