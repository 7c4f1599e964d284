"""The store itself, with its public clients: blocking calls, leased views, and match."""

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, cast

from tests.fakes.store import HASH_BYTES, manifest_of

from benchmarks.store.contender import BATCH_BLOCKS, Call, Contender, Seat
from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, MatchReply, RegisterReply, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.manifest_ids import encode_register
from kvrouter_store.client.results import PutResult

if TYPE_CHECKING:
    from kvrouter_store.client.dialer import TransportName

DEADLINE_S = 20
READ_BYTES = 1 << 16


class Kvstore(Contender):
    """The blocking client. Option: `transport` 'shm', 'unix' or 'tcp'."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        size = seat.block_bytes
        transport = cast("TransportName", seat.options["transport"])
        url = f"kv://{seat.server['host']}:{seat.server['port']}"
        self.client = StoreClient(url, transport=transport, deadline_s=DEADLINE_S)
        self.manifest = manifest_of(size)
        self.hashes = os.urandom(HASH_BYTES * seat.blocks)
        used = size * seat.blocks
        self._source = Segments.over(seat.source.view[:used], size)
        self._landing = Segments.over(seat.landing.view[:used], size, writable=True)
        self._before: tuple[bytes, range] | None = None

    def putting(self, first: int, blocks: int) -> Call:
        """One call."""
        span = range(first, first + blocks)
        return partial(self.client.put, self.manifest, 0, self.hashes, span, self._source, span)

    def getting(self, first: int, blocks: int) -> Call:
        """One call."""
        span, to = range(first, first + blocks), self._landing
        return partial(self.client.get_into, self.manifest, 0, self.hashes, span, to, span)

    def answer(self, op: str, blocks: int) -> object:
        """The status of every block."""
        if op == "put":
            return PutResult((BlockStatus.STORED,) * blocks)
        return [BlockStatus.OK] * blocks

    def warm(self) -> None:
        """Write and read the whole pool if it is mapped, so that its pages are mapped too."""
        if self.seat.options["transport"] != "shm":
            return
        span = range(BATCH_BLOCKS)
        for _ in range(0, int(self.seat.server["pool_bytes"]), len(span) * self.seat.block_bytes):
            hashes = os.urandom(HASH_BYTES * len(span))
            self.client.put(self.manifest, 0, hashes, span, self._source, span)
            self.client.get_into(self.manifest, 0, hashes, span, self._landing, span)
        self.client.purge()

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """`match`: of all hashes. `mix`: puts new blocks, gets those of the previous call.

        The unit of a mix is a moved block: the pool is full, and every put evicts.
        """
        if op == "match":
            found = self.client.match(self.manifest, self.hashes).blocks
            if found != self.seat.blocks:
                raise RuntimeError(f"{found} blocks match instead of {self.seat.blocks}")
            return 1, range(0)
        span = range(BATCH_BLOCKS)
        first = turn * BATCH_BLOCKS % self.seat.blocks
        hashes, memory = os.urandom(HASH_BYTES * BATCH_BLOCKS), range(first, first + BATCH_BLOCKS)
        stored = self.client.put(self.manifest, 0, hashes, span, self._source, memory)
        self.look("put", BATCH_BLOCKS, stored)
        before, self._before = self._before, (hashes, memory)
        if before is None or not turn:
            return BATCH_BLOCKS, range(0)
        done = self.client.get_into(self.manifest, 0, before[0], span, self._landing, before[1])
        kept = done.count(BlockStatus.OK)  # the pool is full: some may have gone since
        return BATCH_BLOCKS + kept, before[1][:kept]

    def forget(self) -> None:
        """Delete by name."""
        self.client.delete(self.manifest, self.hashes)

    def close(self) -> None:
        """Leave the pool empty."""
        self.client.purge()
        self.client.close()


class View(Kvstore):
    """A get is a lease, a read-only view of each block in the mapped pool, and the release."""

    def getting(self, first: int, blocks: int) -> Call:
        """Two round trips; nothing is copied."""
        return partial(self._lease, first, self._names(first, blocks))

    def answer(self, op: str, blocks: int) -> object:
        """The number of leased blocks."""
        return blocks if op == "get" else super().answer(op, blocks)

    def land(self) -> None:
        """Copy the views."""
        for first in range(0, self.seat.blocks, BATCH_BLOCKS):
            blocks = min(BATCH_BLOCKS, self.seat.blocks - first)
            self._lease(first, self._names(first, blocks), copied=True)

    def _names(self, first: int, blocks: int) -> bytes:
        return self.hashes[first * HASH_BYTES : (first + blocks) * HASH_BYTES]

    def _lease(self, first: int, hashes: bytes, *, copied: bool = False) -> int:
        lease = self.client.acquire(self.manifest, hashes)
        views = [lease.view(block) for block in range(lease.blocks)]
        if copied:
            for block, view in enumerate(views, first):
                self.seat.landed(block)[:] = view
        if not lease.release():
            raise RuntimeError("the lease was lost")
        return lease.blocks


class Pipelined(Kvstore):
    """`match` as frames made before, `window` of them in flight over the Unix socket.

    This measures the node: the client does almost nothing.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._window = int(seat.options["window"])
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(seat.server["path"])
        self._ask(_core.encode_hello(1))
        registered = self._ask(encode_register(2, self.manifest, "", ""))
        assert isinstance(registered, RegisterReply)
        self._manifest_id = registered.manifest_id
        self._frames = b"".join(self._match(number) for number in range(self._window))
        self._reply_bytes = 0

    def repeat(self, op: str, turn: int) -> tuple[int, range]:
        """Send a window while the previous one is answered; each reply is as long as the first."""
        if not turn:
            self._reply_bytes = self._begin()
        self._link.sendall(self._frames)
        left = self._reply_bytes * self._window
        while left:
            left -= len(self._link.recv(min(left, READ_BYTES)))
        return self._window, range(0)

    def close(self) -> None:
        """Read and check the last window, and close the connection."""
        for number in range(self._window if self._reply_bytes else 0):
            reply = self._reply()
            if not (isinstance(reply, MatchReply) and reply.blocks == self.seat.blocks):
                raise RuntimeError(f"reply {number} is not a match of all blocks")
        self._link.close()
        super().close()

    def _begin(self) -> int:
        """Send the first window; the length of a reply."""
        self._link.sendall(self._match(0))
        header = _core.decode_header(self._peek())
        size = _core.HEADER_BYTES + header.body_bytes
        self._reply()
        self._link.sendall(self._frames)
        return size

    def _match(self, number: int) -> bytes:
        return _core.encode_match(100 + number, self._manifest_id, self.hashes)

    def _ask(self, frame: bytes) -> object:
        self._link.sendall(frame)
        return self._reply()

    def _peek(self) -> bytes:
        return self._link.recv(_core.HEADER_BYTES, socket.MSG_PEEK | socket.MSG_WAITALL)

    def _reply(self) -> object:
        header = _core.decode_header(self._link.recv(_core.HEADER_BYTES, socket.MSG_WAITALL))
        body = self._link.recv(header.body_bytes, socket.MSG_WAITALL)
        return _core.decode_reply(header, body)
