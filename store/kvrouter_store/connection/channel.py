"""One connection of a blocking client: requests and their replies, each by a deadline.

One thread at a time uses a channel (see `lock`). After LinkLost it is of no more use, and what it
held at the node (reservations, leases) is gone.

With the HELLO over a Unix socket descriptors pass: the fence, and the pool. What the node sends is
mapped here; none of its descriptors stays open.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

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
from kvrouter_store.connection.tls import sentence
from kvrouter_store.errors import (
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    Unauthorized,
    UnknownManifest,
    Untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter_store.connection.address import Address
    from kvrouter_store.connection.deadline import Deadline

READ_BYTES = 1 << 16
SHARED_FDS = 3  # pool, directory, notes
Access = PoolAccess
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the node answered, and what it shares: None where it shares nothing."""

    reply: HelloReply | ErrorReply
    pool: PoolView | None = None
    directory: DirectoryReader | None = None
    writer: LocalWriter | None = None


def exchange_hello(
    link: socket.socket, frame: bytes, deadline: Deadline, *, writes: bool
) -> Handshake:
    """Send a HELLO that asks for the pool, and map what comes.

    A client that `writes` sends a fence along: the read end of a pipe, which shows the node when
    this client can no longer write the pool. Raises OSError where the link breaks, ValueError where
    something else comes than a reply to HELLO.
    """
    fence_read, fence_write = os.pipe2(os.O_CLOEXEC) if writes else (None, None)
    fds: list[int] = []
    try:
        socket.send_fds(link, [frame], [] if fence_read is None else [fence_read])
        _await(link, deadline)
        data, fds, _, _ = socket.recv_fds(link, READ_BYTES, 4)
        reply = _understood(link, frame, data, deadline)
    except BaseException:
        _close(*fds, fence_write)
        raise
    finally:
        _close(fence_read)
    return _mapped(reply, fds, fence_write)


def _understood(
    link: socket.socket, frame: bytes, data: bytes, deadline: Deadline
) -> HelloReply | ErrorReply:
    data = _filled(link, data, _core.HEADER_BYTES, deadline)
    header = _core.decode_header(data)
    size = _core.HEADER_BYTES + header.body_bytes
    data = _filled(link, data, size, deadline)
    if len(data) > size or header.request_id != _core.decode_header(frame).request_id:
        raise ValueError("a reply came that was not asked for")
    reply = _core.decode_reply(header, data, _core.HEADER_BYTES)
    if not isinstance(reply, HelloReply | ErrorReply):
        raise ValueError("a reply came that was not asked for")
    return reply


def _filled(link: socket.socket, data: bytes, size: int, deadline: Deadline) -> bytes:
    """The data, and what comes until there are at least `size` bytes of it."""
    while len(data) < size:
        _await(link, deadline)
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionError("the store closed the connection")
        data += piece
    return data


def _mapped(reply: HelloReply | ErrorReply, fds: list[int], fence_write: int | None) -> Handshake:
    """Takes ownership of the descriptors."""
    try:
        if not fds or isinstance(reply, ErrorReply) or reply.access == PoolAccess.NONE:
            _close(fence_write)
            return Handshake(reply)
        writable = reply.access == PoolAccess.WRITE
        page_bytes = reply.page_bytes
        pool = PoolView(fds[0], reply.pool_bytes, writable, fence_write, page_bytes=page_bytes)
        if not reply.directory_bytes or len(fds) != SHARED_FDS:
            return Handshake(reply, pool)
        directory = DirectoryReader(fds[1], reply.directory_bytes, fds[2])
        return Handshake(reply, pool, directory, directory.writer() if writable else None)
    finally:
        _close(*fds)


def _await(link: socket.socket, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    if not poll.poll(deadline.left_s() * 1000):
        raise TimeoutError


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


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
