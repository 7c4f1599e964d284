"""One connection of a blocking client: requests and their replies, each by a deadline.

One thread at a time uses a channel (see `lock`). After LinkLost it is of no more use, and what it
held at the node (reservations, leases) is gone.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from kvrouter_store import _core
from kvrouter_store._core import (
    BlockNames,
    DirectoryReader,
    ErrorReply,
    HelloReply,
    Link,
    LocalWriter,
    PoolAccess,
    PoolView,
    Status,
    TlsContext,
    TlsError,
)
from kvrouter_store.connection.address import Address
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.handshake import exchange_hello
from kvrouter_store.connection.tls import sentence
from kvrouter_store.errors import (
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    Unauthorized,
    UnknownManifest,
    Untrusted,
)

Access = PoolAccess
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows a node: its name, its token, and what it needs for TLS."""

    name: str = ""
    token: str = field(default="", repr=False)
    tls: TlsContext | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """The ids that a node gave to a manifest in one of its lives (`epoch`)."""

    epoch: int
    manifest_id: int
    spec_id: int
    part_ids: tuple[int, ...]
    names: BlockNames = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", BlockNames(self.spec_id, self.part_ids))


class RemoteMemory(Protocol):
    """The pool of a node on another host, as one connection reaches it by RDMA."""

    def close(self) -> None:
        """Give it up. Idempotent."""


class LinkLost(StoreUnavailable):
    """The connection broke. Nothing is known of the effect of the last request."""


class Channel:
    """A connection after its handshake.

    `link` does the exchanges. `pool` is the mapped pool, None without shared memory; `directory`
    finds blocks in it without a request and `writer` puts them there, None where the node gives
    none. `remote` is the pool over RDMA, None where the channel is not attached. `announced` are
    the manifests registered on this connection. `pending`: a request was sent and its reply not
    yet read in full, so that nothing else can be asked.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        deadline: Deadline,
        access: Access = Access.NONE,
    ) -> None:
        self.lock = threading.Lock()
        self.leases = 0
        self.broken = False
        self.pending = False
        self.pool: PoolView | None = None
        self.directory: DirectoryReader | None = None
        self.writer: LocalWriter | None = None
        self.remote: RemoteMemory | None = None
        self.announced: dict[tuple[bytes, str, str], Registration] = {}
        self._address = address
        self._owner_pid = os.getpid()
        self._socket = _connect(address, deadline)
        try:
            self.link = self._open_link(credentials.tls, deadline)
            self.hello = self._shake_hands(credentials, access, deadline)
            self.link.digests = self.hello.digests
        except BaseException:
            self.discard()
            raise

    def ask(
        self,
        kind: type[R],
        deadline: Deadline,
        encode: Callable[Concatenate[int, P], bytes],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R:
        """Send one request, which `encode` makes of a request id and the arguments; its reply.

        Raises StoreRefused where the node refuses, LinkLost where the reply is not of this kind.
        """
        frame = encode(self.link.next_id(), *arguments, **options)
        reply = self.exchange(self.link.ask, frame, deadline.at)
        if not isinstance(reply, kind):
            self.lost(ValueError("a reply came that was not asked for"))
        return reply

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
        """False once it was closed, and in a forked child: link and pool are the parent's."""
        return not self.broken and self._owner_pid == os.getpid()

    def alive(self) -> bool:
        """Whether the connection is up, as far as can be seen without a round trip."""
        return self.usable and self.link.quiet()

    def lost(self, error: BaseException) -> NoReturn:
        """Give the connection up because of `error`."""
        self.close()
        if isinstance(error, TlsError):
            raise Untrusted(sentence(str(error), self._address)) from error
        if isinstance(error, TimeoutError | DeadlineExceeded):
            raise DeadlineExceeded("the store did not answer within the deadline") from error
        raise LinkLost(f"the link to the store broke: {error}") from error

    def close(self) -> None:
        """End the connection (a thread that waits on it wakes up), and give up the mapping."""
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
        """Close for good. Only the thread that holds the lock may do that."""
        self.close()
        if self.remote is not None and self._owner_pid == os.getpid():
            self.remote.close()
        self._socket.close()

    @property
    def descriptor(self) -> int:
        """The descriptor of its socket, only to be polled for a hang-up."""
        return self._socket.fileno()

    def _open_link(self, tls: TlsContext | None, deadline: Deadline) -> Link:
        """The link over the connected socket; for kvs:// after the TLS handshake."""
        if not self._address.tls:
            return Link(self._socket.fileno())
        assert tls is not None  # native_context() makes one for every such address
        link = Link(self._socket.fileno(), tls, self._address.host)
        try:
            link.handshake(deadline.at)
        except OSError as error:
            self.lost(error)
        return link

    def _shake_hands(
        self, credentials: Credentials, access: Access, deadline: Deadline
    ) -> HelloReply:
        hello = partial(
            _core.encode_hello,
            name=credentials.name,
            token=credentials.token,
            want_pool=access != Access.NONE,
            want_write=access == Access.WRITE,
            numa_node=_core.current_numa_node(),
        )
        if access == Access.NONE:
            return self.ask(HelloReply, deadline, hello)
        try:
            frame = hello(self.link.next_id())
            met = exchange_hello(self._socket, frame, deadline, writes=access == Access.WRITE)
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


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    """A connected blocking socket. Raises StoreUnavailable."""
    link = None
    try:
        if address.path:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(deadline.left_s())
            link.connect(address.path)
        else:
            target = (address.host, address.port)
            link = socket.create_connection(target, timeout=deadline.left_s())
            _core.tune_tcp(link.fileno())
        link.settimeout(None)
    except BaseException as error:
        if link is not None:
            link.close()
        if isinstance(error, OSError):
            reason = error.strerror or error  # without the number
            raise StoreUnavailable(f"no connection to the store at {address}: {reason}") from error
        raise
    return link
