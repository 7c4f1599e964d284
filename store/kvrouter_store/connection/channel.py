"""One connection of a blocking client: requests and their replies, each by a deadline.

A channel is used by one thread at a time (its `lock`). After LinkLost it is of no more use; what it
held at the server (reservations, leases) went with it.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, ParamSpec, Protocol, TypeVar, cast

from kvrouter_store import _core
from kvrouter_store._core import (
    DirectoryReader,
    ErrorReply,
    HelloReply,
    Link,
    LocalWriter,
    PoolAccess,
    PoolView,
    Status,
)
from kvrouter_store.connection.address import Address
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.dial import dial
from kvrouter_store.connection.handshake import greet
from kvrouter_store.errors import (
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    Unauthorized,
    UnknownManifest,
)

if TYPE_CHECKING:
    from kvrouter_store._core import _Answer as Answer
    from kvrouter_store.connection.registration import Registration

__all__ = ["Access", "Channel", "Deadline", "LinkLost", "refused"]

Access = PoolAccess
P = ParamSpec("P")
R = TypeVar("R")


class RemoteMemory(Protocol):
    """The pool of a node on another host, as one connection reaches it without the node."""

    def close(self) -> None:
        """Give it up. Idempotent."""


class LinkLost(StoreUnavailable):
    """The connection broke. Nothing is known of the effect of the last request."""


class Channel:
    """A connection after its HELLO.

    `link` does the exchanges. `pool` is the mapping it may use, None without shared memory;
    `directory` finds blocks in it without asking, and `writer` puts them so; None where the server
    gives none. `remote` is the pool over RDMA, None where the channel is not attached. `pending`: a
    request was sent and its reply (with its payload) not yet read, so nothing else can be asked.
    """

    def __init__(
        self,
        address: Address,
        deadline: Deadline,
        *,
        name: str,
        token: str = "",
        access: Access = Access.NONE,
    ) -> None:
        self.lock = threading.Lock()
        self.owner_pid = os.getpid()
        self.leases = 0
        self.broken = False
        self.pending = False
        self.pool: PoolView | None = None
        self.directory: DirectoryReader | None = None
        self.writer: LocalWriter | None = None
        self.remote: RemoteMemory | None = None
        self.announced: dict[tuple[bytes, str, str], Registration] = {}
        self._socket = dial(address, deadline)
        try:
            self.link = self._begin(self._socket.fileno(), deadline)
            self.hello = self._greet(name, token, access, deadline)
            self.link.digests = self.hello.digests
        except BaseException:
            self.discard()
            raise

    def next_id(self) -> int:
        """A request id that this connection has not used."""
        return self.link.next_id()

    def ask(self, kind: type[R], frame: bytes, deadline: Deadline) -> R:
        """Send one request; its reply, which is of this kind.

        Raises StoreRefused where the server says no, LinkLost where it says anything else.
        """
        reply = self.call(frame, deadline)
        if not isinstance(reply, kind):
            self.lost(ValueError("a reply came that was not asked for"))
        return reply

    def call(self, frame: bytes, deadline: Deadline) -> "Answer":
        """Send one request; its reply, of the request's op. Raises as `ask`."""
        return cast("Answer", self.exchange(self.link.ask, frame, deadline.at))

    def exchange(
        self, native: Callable[P, R | ErrorReply], *arguments: P.args, **options: P.kwargs
    ) -> R:
        """Make one exchange of `link`. Raises StoreRefused, LinkLost, DeadlineExceeded."""
        self.pending = True
        try:
            reply = native(*arguments, **options)
        except OSError as error:
            self.lost(error)
        self.pending = False
        if isinstance(reply, ErrorReply):
            raise refused(reply.status, reply.message)
        return reply

    @property
    def usable(self) -> bool:
        """False once it was closed, and in a forked child: its link and pool are the parent's."""
        return not self.broken and self.owner_pid == os.getpid()

    def alive(self) -> bool:
        """Whether the link still stands, as far as can be seen without a round trip."""
        return self.usable and self.link.quiet()

    def lost(self, error: BaseException) -> NoReturn:
        """Give the connection up because of `error`."""
        self.close()
        if isinstance(error, TimeoutError | DeadlineExceeded):
            raise DeadlineExceeded("the store did not answer within the deadline") from error
        raise LinkLost(f"the link to the store broke: {error}") from error

    def close(self) -> None:
        """End the connection (a thread that waits on it is woken), and give up the mapping."""
        if self.usable:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.broken = True
        if self.pool is not None:
            self.pool.close()
        if self.directory is not None:
            self.directory.close()
        self.writer = None

    def discard(self) -> None:
        """Close for good: only by the thread that holds the lock."""
        mine = self.owner_pid == os.getpid()
        self.close()
        if self.remote is not None and mine:
            self.remote.close()
        self._socket.close()

    @property
    def descriptor(self) -> int:
        """Of its socket: to be polled for a hang-up, and for nothing else."""
        return self._socket.fileno()

    def _begin(self, fd: int, deadline: Deadline) -> Link:
        """The link over the connected socket: what is to be done before HELLO."""
        return Link(fd)

    def _greet(self, name: str, token: str, access: Access, deadline: Deadline) -> HelloReply:
        want_pool, want_write = access != Access.NONE, access == Access.WRITE
        frame = _core.encode_hello(
            self.next_id(),
            name=name,
            token=token,
            want_pool=want_pool,
            want_write=want_write,
            numa_node=_core.current_numa_node(),
        )
        if not want_pool:
            return self.ask(HelloReply, frame, deadline)
        try:
            met = greet(self._socket, frame, writes=want_write, deadline=deadline)
        except (OSError, ValueError, DeadlineExceeded) as error:
            self.lost(error)
        if isinstance(met.reply, ErrorReply):
            raise refused(met.reply.status, met.reply.message)
        self.pool, self.directory, self.writer = met.pool, met.directory, met.writer
        return met.reply


def refused(status: Status, message: str) -> StoreRefused:
    """The exception that a reply with this status means."""
    if status == Status.UNKNOWN_MANIFEST:
        return UnknownManifest(message, status.name)
    if status == Status.UNAUTHORIZED:
        remedy = "give this client a token of the store (KVROUTER_STORE_TOKEN)"
        return Unauthorized(f"the store refused: {message}; {remedy}", status.name)
    return StoreRefused(f"the store refused: {message}", status.name)
