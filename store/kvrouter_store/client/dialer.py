"""How a blocking client reaches its node: by which transport, and when it may try again.

The transport is chosen once, and again after a connection could not be made.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvrouter_store.connection.address import Address, Kind, nearer_path
from kvrouter_store.connection.channel import Access, Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.reconnect import BackOff
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator, NotAttached

log = logging.getLogger(__name__)
MOST_ATTACHING_S = 1.0
TransportName = Literal["auto", "shm", "unix", "tcp", "rdma"]


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """By which transport bytes travel, and where to connect for that."""

    kind: Kind
    address: Address


@dataclass(eq=False, repr=False)
class Dialer:
    """Opens channels to one node. Safe in threads.

    wish: the transport that the user asks for. prepare: is called with each new channel before its
    first use. ValueError and RdmaUnavailable where the wish cannot be met here.
    """

    address: Address
    wish: TransportName
    credentials: Credentials
    rdma: Initiator
    prepare: Callable[[Channel, Deadline], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.wish == "tcp" and self.address.path:
            raise ValueError(f"transport 'tcp' cannot be had at {self.address}; use kv://HOST:PORT")
        if self.wish == "rdma":
            self.rdma.open()
        self.chosen: ChosenTransport | None = None
        self._rdma_denied = False
        self._digests = True
        self._backoff = BackOff()
        self._why = ""
        self._lock = threading.Lock()

    def choose(self, deadline: Deadline) -> ChosenTransport:
        """The transport; asks the node if need be. Raises as `open`."""
        chosen = self.chosen
        if chosen is not None:
            return chosen
        if not self._lock.acquire(timeout=deadline.left_s()):
            raise StoreUnavailable("the store did not answer within the deadline")
        try:
            chosen = self.chosen
            if chosen is None:
                self._check_pause()
                with self._counted():
                    chosen = self.chosen = self._ask(deadline)
            return chosen
        finally:
            self._lock.release()

    def open(self, access: Access, deadline: Deadline) -> Channel:
        """A new channel, with that access to the pool where it can be mapped.

        Raises StoreUnavailable, at once in the pause after an attempt that failed.
        """
        chosen = self.choose(deadline)
        self._check_pause()
        try:
            channel = self._open(chosen, access, deadline)
        except DeadlineExceeded as error:
            self._failed(error)
            raise
        except StoreUnavailable:
            self._forget(chosen)
            chosen = self.choose(deadline)
            with self._counted():
                channel = self._open(chosen, access, deadline)
        self._backoff.succeeded()
        return channel

    def probe(self, deadline: Deadline) -> None:
        """Find out whether the node answers. Raises StoreUnavailable, StoreRefused."""
        Channel(self.choose(deadline).address, self.credentials, deadline).discard()

    def close(self) -> None:
        """Close the RDMA device, once no channel uses it any more."""
        self.rdma.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A pause begins if this fails. Success counts only with a whole channel: see `open`."""
        try:
            yield
        except StoreUnavailable as error:
            self._failed(error)
            raise

    def _failed(self, error: StoreUnavailable) -> None:
        self._backoff.failed(self.clock())
        self._why = str(error)

    def _check_pause(self) -> None:
        pause_s = self._backoff.remaining_s(self.clock())
        if pause_s:
            raise StoreUnavailable(f"{self._why}; next try in {pause_s:.2f} s")

    def _forget(self, chosen: ChosenTransport) -> None:
        """No channel can be opened so (any more): choose again."""
        with self._lock:
            if self.chosen == chosen:
                self.chosen = None
                # A node that denied RDMA is reached over TCP; after a restart it may have RDMA.
                self._rdma_denied = self._rdma_denied and chosen.kind == "rdma"

    def _open(self, chosen: ChosenTransport, access: Access, deadline: Deadline) -> Channel:
        access = access if chosen.kind == "shm" else Access.NONE
        channel = Channel(chosen.address, self.credentials, deadline, access)
        try:
            self._note_digests(channel.hello.digests)
            if chosen.kind == "rdma":
                self._attach(channel, deadline)
            self.prepare(channel, deadline)
        except BaseException:
            channel.discard()
            raise
        return channel

    def _note_digests(self, digests: bool) -> None:
        before, self._digests = self._digests, digests
        if before and not digests:
            log.info("the store has digests off: nothing that is read from it is checked")

    def _attach(self, channel: Channel, deadline: Deadline) -> None:
        """Give a new channel its queue pair.

        Raises StoreUnavailable where it gets none; unless RDMA is demanded, TCP is chosen next.
        """
        try:
            if self.wish != "rdma":
                # A node that does not answer this may yet answer everything else.
                deadline = Deadline(min(MOST_ATTACHING_S, deadline.left_s() / 2))
            self.rdma.attach(channel, deadline)
        except (RdmaUnavailable, StoreUnavailable) as error:
            if self.wish != "rdma":
                self._rdma_denied = True
                log.info("blocks travel over TCP, not RDMA: %s", error)
                raise NotAttached(str(error)) from error
            if not isinstance(error, NotAttached):
                raise
            why = f"transport 'rdma' cannot be had at {self.address}: {error}"
            raise StoreUnavailable(why) from error

    def _ask(self, deadline: Deadline) -> ChosenTransport:
        if self.wish in {"tcp", "rdma"}:
            return ChosenTransport("rdma" if self.wish == "rdma" else "tcp", self.address)
        path, epoch = self.address.path, 0
        if not path:
            path, epoch = self._path_here(deadline)
        local = Address(path=path)
        kind = self._kind_at(local, epoch, deadline) if path else None
        if kind and self.wish == "unix":
            return ChosenTransport("unix", local)
        if kind == "shm" or (kind and self.wish == "auto"):
            return ChosenTransport(kind, local)
        if self.wish == "auto" and not self.address.path:
            return ChosenTransport("rdma" if self._has_device() else "tcp", self.address)
        raise StoreUnavailable(
            f"transport {self.wish!r} cannot be had at {self.address}: the store's Unix socket "
            "is not reachable from here; use transport 'tcp'"
        )

    def _has_device(self) -> bool:
        """Whether to try RDMA where the user does not ask for it. Never under TLS."""
        if self.address.tls or self._rdma_denied:
            return False
        try:
            self.rdma.open()
        except RdmaUnavailable as problem:
            log.info("blocks travel over TCP, not RDMA: %s", problem)
            return False
        return True

    def _path_here(self, deadline: Deadline) -> tuple[str, int]:
        """The path of the node's Unix socket, if it runs on this host; and the node's epoch."""
        probe = Channel(self.address, self.credentials, deadline)
        try:
            hello = probe.hello
            return nearer_path(hello.unix_path, hello.boot_id), hello.epoch
        finally:
            probe.discard()

    def _kind_at(self, local: Address, epoch: int, deadline: Deadline) -> Kind | None:
        """What a connection over the Unix socket gets; None where it does not lead to the node.

        In another container the same path may be another node's socket: its epoch differs.
        """
        try:
            probe = Channel(local, self.credentials, deadline, Access.READ)
        except DeadlineExceeded:  # it may be the node, busy: the choice would outlast that
            raise
        except (StoreUnavailable, OSError):
            if self.address.path:
                raise
            return None
        try:
            if epoch and probe.hello.epoch != epoch:
                return None
            return "shm" if probe.pool is not None else "unix"
        finally:
            probe.discard()
