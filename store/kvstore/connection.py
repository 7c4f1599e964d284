"""One connection of a blocking client: frames out, replies in, each by a deadline.

A channel is used by one thread at a time (its `lock`). After LinkLost it is of no more use; what it
held at the server (reservations, leases) went with it.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from kvstore import _core
from kvstore._core import (
    DirectoryReader,
    ErrorReply,
    Header,
    HelloReply,
    LocalWriter,
    PoolAccess,
    PoolView,
    Status,
)
from kvstore.address import Address
from kvstore.errors import (
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    Unauthorized,
    UnknownManifest,
)

if TYPE_CHECKING:
    from kvstore._core import TlsLink
    from kvstore._core import _Reply as Reply
    from kvstore.answers import Registration

__all__ = ["Access", "Channel", "Deadline", "LinkLost", "refused"]

READ_BYTES = 1 << 16
SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # plain ints: an enum's | is not free
PEEK_FLAGS = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
HEADER_BYTES = _core.HEADER_BYTES
MIN_RATE_BYTES_S = 64 << 20
SHARED_FDS = 3  # pool, directory, notes
Access = PoolAccess


class LinkLost(StoreUnavailable):
    """The connection broke. Nothing is known of the effect of the last request."""


class Deadline:
    """A point in time: `deadline_s` from now, and one second more for each 64 MiB of payload."""

    __slots__ = ("at",)

    def __init__(self, deadline_s: float, payload_bytes: int = 0) -> None:
        self.at = time.monotonic() + deadline_s + payload_bytes / MIN_RATE_BYTES_S

    def left_s(self) -> float:
        """Seconds that remain. Raises DeadlineExceeded where none does."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the store did not answer within the deadline")
        return left


@dataclass(frozen=True, slots=True)
class Fence:
    """A pipe that tells the server when this client can no longer write the pool."""

    read_fd: int
    write_fd: int

    @classmethod
    def open(cls) -> "Fence":
        """Make the pipe. The write end goes to a PoolView, the read end to the server."""
        return cls(*os.pipe2(os.O_CLOEXEC))


class Channel:
    """A connection after its HELLO.

    `pool` is the mapping it may use, None without shared memory; `directory` finds blocks in it
    without asking, and `writer` puts them so; None where the server gives none. `pending`: a
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
        self.announced: dict[tuple[bytes, str, str], Registration] = {}
        self._request_id = 0
        self._patience_s = 0.0  # what SO_RCVTIMEO is set to
        self._socket = _connect(address, deadline)
        self._fd = self._socket.fileno()
        try:
            self._begin(deadline)
            self.hello = self._greet(name, token, access, deadline)
        except BaseException:
            self.discard()
            raise

    @property
    def fd(self) -> int:
        """The socket's descriptor, for payloads."""
        return self._fd

    @property
    def wire(self) -> "int | TlsLink":
        """What payloads travel on."""
        return self._fd

    def next_id(self) -> int:
        """A request id that this connection has not used."""
        self._request_id += 1
        return self._request_id

    def call(self, frame: bytes, deadline: Deadline) -> "Reply":
        """Send one request and return its reply. Raises StoreRefused where the server says no."""
        self.send(frame, deadline)
        return self.receive(deadline)

    def send(self, frame: bytes, deadline: Deadline) -> None:
        """Send a whole frame."""
        self.pending = True
        try:
            sent = self._socket.send(frame, SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.lost(error)
        if sent != len(frame):
            self._send_rest(memoryview(frame)[sent:], deadline)

    def receive(self, deadline: Deadline) -> "Reply":
        """The reply to the last request, which has no payload."""
        data = self._receive_some(READ_BYTES, deadline)
        if len(data) < HEADER_BYTES:
            data += self._receive_exactly(HEADER_BYTES - len(data), deadline)
        header = self._header(data)
        missing = HEADER_BYTES + header.body_bytes - len(data)
        if missing > 0:
            data += self._receive_exactly(missing, deadline)
        return self._reply(header, data, HEADER_BYTES, extra=-missing)

    def receive_before_payload(self, deadline: Deadline) -> "Reply":
        """The reply up to where its payload begins; `pending` stays while it has one."""
        header = self._header(self._receive_exactly(HEADER_BYTES, deadline))
        body = self._receive_exactly(header.body_bytes, deadline)
        reply = self._reply(header, body, 0, extra=0)
        self.pending = header.payload_bytes > 0
        return reply

    @property
    def usable(self) -> bool:
        """False once it was closed, and in a forked child: its link and pool are the parent's."""
        return not self.broken and self.owner_pid == os.getpid()

    def alive(self) -> bool:
        """Whether the link still stands, as far as can be seen without a round trip."""
        if not self.usable:
            return False
        try:
            self._socket.recv(1, PEEK_FLAGS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end of the stream, or bytes that nobody asked for

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
        self.close()
        self._socket.close()

    def _begin(self, deadline: Deadline) -> None:
        """What is to be done before HELLO."""

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
            return _expect_hello(self.call(frame, deadline))
        fence = Fence.open() if want_write else None
        try:
            reply, fds = self._exchange_fds(frame, fence, deadline)
        except BaseException:
            if fence:
                os.close(fence.write_fd)
            raise
        finally:
            if fence:
                os.close(fence.read_fd)
        self._map(reply, fds, fence)
        return reply

    def _exchange_fds(
        self, frame: bytes, fence: Fence | None, deadline: Deadline
    ) -> tuple[HelloReply, list[int]]:
        fds: list[int] = []
        try:
            self.pending = True
            socket.send_fds(self._socket, [frame], [fence.read_fd] if fence else [])
            self._wait(select.POLLIN, deadline)
            data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, 4)
            header = self._header(data)
            missing = HEADER_BYTES + header.body_bytes - len(data)
            if missing > 0:
                data += self._receive_exactly(missing, deadline)
            reply = _expect_hello(self._reply(header, data, HEADER_BYTES, extra=0))
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, OSError):
                self.lost(error)
            raise
        return reply, fds

    def _map(self, hello: HelloReply, fds: list[int], fence: Fence | None) -> None:
        try:
            if not fds or hello.access == PoolAccess.NONE:
                if fence:
                    os.close(fence.write_fd)
                return
            writable = hello.access == PoolAccess.WRITE
            write_fd = fence.write_fd if fence else None
            self.pool = PoolView(
                fds[0], hello.pool_bytes, writable, write_fd, page_bytes=hello.page_bytes
            )
            if hello.directory_bytes and len(fds) == SHARED_FDS:
                self.directory = DirectoryReader(fds[1], hello.directory_bytes, fds[2])
                self.writer = self.directory.writer() if writable else None
        finally:
            for fd in fds:
                os.close(fd)

    def _header(self, data: bytes) -> Header:
        try:
            if len(data) < HEADER_BYTES:
                raise ConnectionError("the store closed the connection")
            header = _core.decode_header(data)
        except (ValueError, ConnectionError) as error:
            self.lost(error)
        if header.request_id != self._request_id:
            self.lost(ValueError(f"reply to request {header.request_id} was not asked for"))
        return header

    def _reply(self, header: Header, data: bytes, offset: int, *, extra: int) -> "Reply":
        if extra > 0:
            self.lost(ValueError(f"{extra} bytes came that nobody asked for"))
        try:
            reply = _core.decode_reply(header, data, offset)
        except ValueError as error:
            self.lost(error)
        self.pending = False
        if isinstance(reply, ErrorReply):
            raise refused(header.status, reply.message)
        return reply

    def _wait(self, events: int, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(self._fd, events)
        try:
            left_s = deadline.left_s()
        except DeadlineExceeded as error:
            self.lost(error)
        if not poll.poll(left_s * 1000):
            self.lost(TimeoutError())

    def _receive_some(self, most: int, deadline: Deadline) -> bytes:
        try:
            self._have_patience(deadline.left_s())
            data = self._socket.recv(most)
        except BlockingIOError:
            self.lost(TimeoutError())
        except (OSError, DeadlineExceeded) as error:
            self.lost(error)
        if not data:
            self.lost(ConnectionError("the store closed the connection"))
        return data

    def _have_patience(self, left_s: float) -> None:
        """Let the kernel keep the deadline of a recv: one system call less than to poll first."""
        if not 0.9 * self._patience_s < left_s < 1.1 * self._patience_s:
            seconds = int(left_s)
            micros = max(1, int((left_s - seconds) * 1e6))
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, micros)
            )
            self._patience_s = left_s

    def _receive_exactly(self, size: int, deadline: Deadline) -> bytes:
        pieces = []
        while size > 0:
            piece = self._receive_some(size, deadline)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _send_rest(self, rest: memoryview, deadline: Deadline) -> None:
        while rest:
            self._wait(select.POLLOUT, deadline)
            try:
                sent = self._socket.send(rest, SEND_FLAGS)
            except BlockingIOError:
                continue
            except OSError as error:
                self.lost(error)
            rest = rest[sent:]


def refused(status: Status, message: str) -> StoreRefused:
    """The exception that a reply with this status means."""
    if status == Status.UNKNOWN_MANIFEST:
        return UnknownManifest(message, status.name)
    if status == Status.UNAUTHORIZED:
        remedy = "give this client a token of the store (KVROUTER_STORE_TOKEN)"
        return Unauthorized(f"the store refused: {message}; {remedy}", status.name)
    return StoreRefused(f"the store refused: {message}", status.name)


def _expect_hello(reply: "Reply") -> HelloReply:
    assert isinstance(reply, HelloReply)
    return reply


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    try:
        if address.path:
            link = _connect_unix(address.path, deadline)
        else:
            target = (address.host, address.port)
            link = socket.create_connection(target, timeout=deadline.left_s())
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise StoreUnavailable(f"no connection to the store at {address}: {error}") from error
    link.settimeout(None)
    return link


def _connect_unix(path: str, deadline: Deadline) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(deadline.left_s())
        link.connect(path)
    except BaseException:
        link.close()
        raise
    return link
