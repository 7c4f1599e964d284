"""One pipelined connection of the asyncio client: requests by id, replies in any order.

Lives in one event loop and is not safe in threads. No reply is lost: what a cancelled caller would
have held (a lease) is given back when its reply comes.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from kvrouter_store import _core
from kvrouter_store._core import AcquireReply, ErrorReply, Header, HelloReply, Op, WaitReply
from kvrouter_store.connection.asyncio_tls import tls_reason
from kvrouter_store.connection.channel import LinkLost, refused
from kvrouter_store.connection.tls import sentence
from kvrouter_store.errors import DeadlineExceeded, StoreRefused, StoreUnavailable, Untrusted

if TYPE_CHECKING:
    from kvrouter_store._core import _Reply as Reply

P = ParamSpec("P")
R = TypeVar("R")
HEADER_BYTES = _core.HEADER_BYTES
MAX_BUFFERED_BYTES = 1 << 20
RELEASE_SOON_S = 0.02
TICK_S = 0.05


@dataclass(slots=True)
class _Pending:
    answer: "asyncio.Future[Reply]"
    due_s: float  # on the loop's clock


class AsyncLink(asyncio.Protocol):
    """A connection. `lost` says why it ended; `ids` are the manifests that it knows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lost: asyncio.Future[str] = loop.create_future()
        self.ids: dict[bytes, int] = {}
        self.epoch = 0
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, _Pending] = {}
        self._orphans: dict[int, float] = {}  # requests without a caller; when a reply is due
        self._deadline_s = 0.0
        self._request_id = 0
        self._unsent: list[bytes] = []
        self._flushing = False
        self._unsent_timer: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._rest = b""
        self._foreign: StoreRefused | None = None

    @property
    def standing(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def shake_hands(self, name: str, token: str, deadline_s: float) -> HelloReply:
        """Say HELLO. The node has `deadline_s` to answer it, and later each CANCEL."""
        self._deadline_s = deadline_s
        hello = await self.ask(HelloReply, deadline_s, _core.encode_hello, name=name, token=token)
        self.epoch = hello.epoch
        return hello

    async def ask(
        self,
        kind: type[R],
        deadline_s: float,
        encode: Callable[Concatenate[int, P], bytes],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R:
        """Send a request, which `encode` makes of a request id and the arguments; its reply.

        LinkLost where the connection breaks first; DeadlineExceeded where nothing came in time (the
        connection is then given up); StoreRefused where the node refuses. Cancelling a WAIT cancels
        it at the node, which must answer that in time.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise LinkLost("the link to the store broke")
        if transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            raise DeadlineExceeded("the store does not take requests as fast as they come")
        loop, request_id = self._loop, self._next_id()
        frame = encode(request_id, *arguments, **options)
        answer: asyncio.Future[Reply] = loop.create_future()
        self._pending[request_id] = _Pending(answer, loop.time() + deadline_s)
        self._watch()
        self._send(frame)
        try:
            reply = await answer
        except asyncio.CancelledError:
            self._abandon(request_id, answer)
            raise
        if not isinstance(reply, kind):
            self.close()
            raise LinkLost("the link to the store broke: a reply came that was not asked for")
        return reply

    def release_soon(self, lease_id: int) -> None:
        """Give a lease back with the next request, or within RELEASE_SOON_S if none comes.

        Its reply then comes with that request's reply: neither costs a system call of its own.
        """
        if self.standing:
            request_id = self._next_id()
            self._orphans[request_id] = inf
            self._unsent.append(_core.encode_release(request_id, lease_id))
            if self._unsent_timer is None:
                self._unsent_timer = self._loop.call_later(RELEASE_SOON_S, self._send_unsent)

    def close(self) -> None:
        """Give the connection up; pending requests raise LinkLost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin (called by the loop)."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        """End (called by the loop): fail whatever is pending."""
        if not self.lost.done():
            self.lost.set_result(str(error or "it ended the connection"))
        pending, self._pending = self._pending, {}
        self._unsent.clear()
        for timer in (self._unsent_timer, self._tick):
            if timer is not None:
                timer.cancel()
        for one in pending.values():
            if not one.answer.done():
                one.answer.set_exception(self._foreign or _why_lost(error))

    def data_received(self, data: bytes) -> None:
        """Take in replies (called by the loop)."""
        if self._rest:
            data = self._rest + data
        offset, size = 0, len(data)
        try:
            while size - offset >= HEADER_BYTES:
                header = _core.decode_header(data, offset)
                end = offset + HEADER_BYTES + header.body_bytes
                if size < end:
                    break
                reply = _core.decode_reply(header, data, offset + HEADER_BYTES)
                offset = end
                self._deliver(header, reply)
        except ValueError as error:
            if not self.epoch:  # in place of a reply to HELLO: trying again does not help
                self._foreign = StoreRefused(str(error), "UNSUPPORTED_VERSION")
            self.close()
            return
        self._rest = data[offset:] if offset < size else b""

    def _next_id(self) -> int:
        self._request_id += 1
        return self._request_id

    def _send(self, frame: bytes) -> None:
        """Send a frame, in one write with whatever else this turn of the loop sends."""
        self._unsent.append(frame)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _send_unsent(self) -> None:
        self._unsent_timer = None
        self._flush()

    def _flush(self) -> None:
        self._flushing = False
        frames, self._unsent = self._unsent, []
        if frames and self.standing:
            assert self._transport is not None
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _tell(self, encode: Callable[[int, int], bytes], number: int) -> None:
        """Send a request and drop its reply."""
        if self.standing:
            request_id = self._next_id()
            self._orphans[request_id] = self._loop.time() + self._deadline_s
            self._watch()
            self._send(encode(request_id, number))

    def _deliver(self, header: Header, reply: "Reply") -> None:
        pending = self._pending.pop(header.request_id, None)
        if pending is None:
            self._take_orphan(header, reply)
        elif pending.answer.done():  # its caller is cancelled and has not run since
            self._give_up(reply)
        elif isinstance(reply, ErrorReply):
            pending.answer.set_exception(refused(header.status, reply.message))
        else:
            pending.answer.set_result(reply)

    def _abandon(self, request_id: int, answer: "asyncio.Future[Reply]") -> None:
        """The caller left. A WAIT is cancelled; the reply of anything is still to be taken in.

        The reply may have come in the same turn of the loop: then the caller never sees it.
        """
        pending = self._pending.pop(request_id, None)
        if pending is None:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._give_up(answer.result())
            return
        self._orphans[request_id] = pending.due_s
        self._tell(_core.encode_cancel, request_id)

    def _take_orphan(self, header: Header, reply: "Reply") -> None:
        if self._orphans.pop(header.request_id, None) is None:
            raise ValueError(f"reply to request {header.request_id} was not asked for")
        if header.op == Op.HELLO:
            raise ValueError("a second HELLO")
        self._give_up(reply)

    def _give_up(self, reply: "Reply") -> None:
        """Give back the lease of a reply that has no caller any more."""
        if isinstance(reply, AcquireReply | WaitReply) and reply.lease_id:
            self._tell(_core.encode_release, reply.lease_id)

    def _watch(self) -> None:
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Give the connection up if a reply is late. One timer serves all requests."""
        self._tick = None
        now_s = self._loop.time()
        late = [one for one in self._pending.values() if one.due_s <= now_s]
        for one in late:
            if not one.answer.done():
                error = DeadlineExceeded("the store did not answer within the deadline")
                one.answer.set_exception(error)
        if late or min(self._orphans.values(), default=inf) <= now_s:
            if not self.lost.done():
                self.lost.set_result("it did not answer within the deadline")
            self.close()
        elif self._pending or self._orphans:
            self._watch()


def _why_lost(error: Exception | None) -> StoreUnavailable:
    if isinstance(error, ssl.SSLError):
        return Untrusted(sentence(tls_reason(error)))
    return LinkLost(f"the link to the store broke: {error}")
