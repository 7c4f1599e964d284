"""Which way leads to a server: shared memory, its Unix socket, RDMA or TCP. It is asked once."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Literal

from kvrouter_store._core import TlsContext
from kvrouter_store.connection.address import Address, Kind, nearer_path
from kvrouter_store.connection.backoff import BackOff
from kvrouter_store.connection.channel import Access, Channel, Deadline
from kvrouter_store.connection.tls_channel import open_channel
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator, NotAttached

__all__ = ["TransportChoice", "TransportName", "Way"]

log = logging.getLogger(__name__)
MOST_ATTACHING_S = 1.0
TransportName = Literal["auto", "shm", "unix", "tcp", "rdma"]


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach the server, and by which transport bytes travel."""

    kind: Kind
    address: Address


class TransportChoice:
    """Finds the way and remembers it until `forget`. Safe in threads."""

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
        if wish == "tcp" and address.path:
            raise ValueError(f"transport 'tcp' cannot be had at {address}; use kv://HOST:PORT")
        self._address = address
        self._wish = wish
        self._name = name
        self._token = token
        self._tls = tls
        self._rdma = rdma
        self._way: Way | None = None
        self._denied = False
        self._backoff = BackOff()
        self._lock = threading.Lock()

    @property
    def known(self) -> Way | None:
        """The way, where it was found already."""
        return self._way

    def find(self, deadline: Deadline) -> Way:
        """The way; asks the server if need be. Raises StoreUnavailable (at once in a back-off)."""
        if self._way is not None:
            return self._way
        if not self._lock.acquire(timeout=deadline.left_s()):
            raise StoreUnavailable("the store did not answer within the deadline")
        try:
            if self._way is None:
                self._way = self._look(deadline)
            return self._way
        finally:
            self._lock.release()

    def forget(self, way: Way) -> None:
        """The way leads nowhere (any more): look again at the next `find`."""
        with self._lock:
            if self._way == way:
                self._way = None
                # Who was denied RDMA takes TCP; another life of the node may have it.
                self._denied = self._denied and way.kind == "rdma"

    def attach(self, channel: Channel, deadline: Deadline) -> None:
        """Give a new channel of an rdma way its queue pair.

        Raises StoreUnavailable where it gets none; if others will do, `find` then knows of one.
        """
        try:
            if self._wish != "rdma":
                # A node that does not answer this may yet answer everything else.
                deadline = Deadline(min(MOST_ATTACHING_S, deadline.left_s() / 2))
            self._rdma.attach(channel, deadline)
        except (RdmaUnavailable, StoreUnavailable) as error:
            if self._wish == "rdma" and not isinstance(error, NotAttached):
                raise
            if self._wish == "rdma":
                why = f"transport 'rdma' cannot be had at {self._address}: {error}"
                raise StoreUnavailable(why) from error
            self._denied = True
            log.info("blocks travel over TCP, not RDMA: %s", error)
            raise NotAttached(str(error)) from error

    def _look(self, deadline: Deadline) -> Way:
        if self._wish == "tcp":
            return Way("tcp", self._address)
        pause_s = self._backoff.remaining_s(time.monotonic())
        if pause_s:
            raise StoreUnavailable(f"the store cannot be reached; next try in {pause_s:.2f} s")
        try:
            way = self._ask(deadline)
        except StoreUnavailable:
            self._backoff.failed(time.monotonic())
            raise
        self._backoff.succeeded()
        return way

    def _ask(self, deadline: Deadline) -> Way:
        if self._wish == "rdma":
            return Way("rdma", self._address)
        path, epoch = self._address.path, 0
        if not path:
            path, epoch = self._path_here(deadline)
        local = Address(path=path)
        kind = self._kind_at(local, epoch, deadline) if path else None
        if kind and self._wish == "unix":
            return Way("unix", local)
        if kind == "shm" or (kind and self._wish == "auto"):
            return Way(kind, local)
        if self._wish == "auto" and not self._address.path:
            return Way("rdma" if self._has_device() else "tcp", self._address)
        raise StoreUnavailable(
            f"transport {self._wish!r} cannot be had at {self._address}: the store's Unix socket "
            "is not reachable from here; use transport 'tcp'"
        )

    def _has_device(self) -> bool:
        """Whether RDMA is to be tried, where nobody said that it must be. Never under TLS."""
        if self._address.tls or self._denied:
            return False
        try:
            self._rdma.open()
        except RdmaUnavailable as problem:
            log.info("blocks travel over TCP, not RDMA: %s", problem)
            return False
        return True

    def _path_here(self, deadline: Deadline) -> tuple[str, int]:
        """The path of the server's Unix socket, if it runs on this host; and the server's epoch."""
        probe = open_channel(
            self._address, deadline, name=self._name, token=self._token, tls=self._tls
        )
        try:
            hello = probe.hello
            return nearer_path(hello.unix_path, hello.boot_id), hello.epoch
        finally:
            probe.discard()

    def _kind_at(self, local: Address, epoch: int, deadline: Deadline) -> Kind | None:
        """What a connection over the Unix socket is given; None where it does not lead there.

        A path means another socket in another container: the epoch tells whose it is.
        """
        try:
            probe = Channel(local, deadline, name=self._name, token=self._token, access=Access.READ)
        except (StoreUnavailable, OSError):
            if self._address.path:
                raise
            return None
        try:
            if epoch and probe.hello.epoch != epoch:
                return None
            return "shm" if probe.pool is not None else "unix"
        finally:
            probe.discard()
