"""A peer that answers otherwise than asked: the link is given up, nobody is told a falsehood."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from tests.fakes.patience import until
from tests.fakes.store import Memory, chain_of, manifest_of

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, LendReply, Op
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.transports import slots
from kvrouter_store.client.transports.base import Target
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Credentials, LinkLost
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import StoreRefused, StoreUnavailable

pytestmark = pytest.mark.slow
BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(3)
LINE = 64
Answers = dict[Op, Callable[[int], bytes]]


def frame(op: Op, request_id: int, body: bytes, status: int = 0, payload: bytes = b"") -> bytes:
    """A whole reply, padded to lines as the protocol wants it."""
    body += bytes(-(len(body) + _core.HEADER_BYTES) % LINE)
    head = struct.pack(
        "<IBBHQIIQ", 0x3152564B, _core.VERSION, op, status, request_id, len(body), 0, len(payload)
    )
    return head + body + payload


def hello(request_id: int) -> bytes:
    """That of a node without a pool to give."""
    fields = struct.pack("<QQQIIBQHHQ", 7, 1, 1 << 20, 4096, 0, 0, 0, 0, 0, 4096)
    return frame(Op.HELLO, request_id, fields)


def registered(request_id: int) -> bytes:
    """The reply to a REGISTER of one part."""
    return frame(Op.REGISTER, request_id, struct.pack("<IIII", 1, 1, 1, 1))


def statuses(request_id: int, *codes: int) -> bytes:
    """The reply to a PUT."""
    return frame(Op.PUT, request_id, struct.pack("<I", len(codes)) + bytes(codes))


def blocks(request_id: int, found: int, payload: bytes | None = None) -> bytes:
    """The reply to a GET with this many blocks, all zero."""
    crcs = struct.pack(f"<{found}I", *[_core.crc32c(bytes(BLOCK))] * found)
    body = struct.pack("<QI", BLOCK, found) + crcs
    return frame(Op.GET, request_id, body, 0, bytes(BLOCK * found) if payload is None else payload)


def refusal(op: Op, request_id: int, text: bytes) -> bytes:
    """An error reply."""
    return frame(op, request_id, struct.pack("<H", len(text)) + text, status=4)


class Liar:
    """A server that says HELLO and REGISTER rightly, and to the rest what it is told to say."""

    def __init__(self, answers: Answers, piece: int = 1 << 20) -> None:
        self._answers: Answers = {Op.HELLO: hello, Op.REGISTER: registered} | answers
        self._piece = piece
        self._door = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.asked: list[Op] = []
        self.url = f"kv://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Hang up on everybody."""
        for one in (self._door, *self._links):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._door.accept()
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while head := link.recv(_core.HEADER_BYTES, socket.MSG_WAITALL):
                header = _core.decode_header(head)
                link.recv(header.body_bytes + header.payload_bytes, socket.MSG_WAITALL)
                self.asked.append(header.op)
                reply = self._answers[header.op](header.request_id)
                for at in range(0, len(reply), self._piece):
                    link.sendall(reply[at : at + self._piece])


@contextlib.contextmanager
def asking(answers: Answers, piece: int = 1 << 20) -> Iterator[StoreClient]:
    """A client over TCP of a liar that gives these answers, in pieces of so many bytes."""
    liar = Liar(answers, piece)
    try:
        with StoreClient(liar.url, transport="tcp", deadline_s=5) as client:
            yield client
    finally:
        liar.close()


def put(client: StoreClient) -> tuple[BlockStatus, ...]:
    memory = Memory(3, BLOCK)
    return client.put(MANIFEST, 0, CHAIN, range(3), memory.segments, range(3)).statuses


def get(client: StoreClient) -> list[BlockStatus]:
    memory = Memory(3, BLOCK)
    return client.get_into(MANIFEST, 0, CHAIN, range(3), memory.segments, range(3))


REQUESTS: dict[Op, Callable[[StoreClient], object]] = {
    Op.REGISTER: lambda c: c.match(MANIFEST, CHAIN),  # which registers first
    Op.MANIFESTS: lambda c: c.manifests(),
    Op.MATCH: lambda c: c.match(MANIFEST, CHAIN),
    Op.ACQUIRE: lambda c: c.acquire(MANIFEST, CHAIN),
    Op.WAIT: lambda c: c.wait(MANIFEST, CHAIN, 1, 1),
    Op.DELETE: lambda c: c.delete(MANIFEST, CHAIN),
    Op.PURGE: lambda c: c.purge(),
    Op.STATS: lambda c: c.stats(),
    Op.PUT: put,
    Op.GET: get,
}


def of_another_version(request_id: int) -> bytes:
    """A HELLO's reply by a node that speaks the next version of the protocol."""
    reply = bytearray(hello(request_id))
    reply[4] = _core.VERSION + 1
    return bytes(reply)


def test_a_client_says_that_its_node_speaks_another_version_of_the_protocol() -> None:
    with (
        asking({Op.HELLO: of_another_version}) as client,
        pytest.raises(StoreUnavailable, match=f"another version than {_core.VERSION}"),
    ):
        client.stats()


async def test_an_asyncio_client_says_so_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    liar = Liar({Op.HELLO: of_another_version})
    try:
        async with AsyncStoreClient(liar.url) as client:
            await until(lambda: "another version" in caplog.text)
            with pytest.raises(StoreRefused, match=f"another version than {_core.VERSION}"):
                await client.stats()
    finally:
        liar.close()


@pytest.mark.parametrize("op", REQUESTS)
def test_a_reply_of_another_op_ends_the_link(op: Op) -> None:
    other = Op.CANCEL if op != Op.CANCEL else Op.STATS
    with (
        asking({op: lambda number: frame(other, number, b"\1")}) as client,
        pytest.raises(LinkLost, match="not asked for"),
    ):
        REQUESTS[op](client)


@pytest.mark.parametrize("op", REQUESTS)
def test_a_reply_to_another_request_ends_the_link(op: Op) -> None:
    with (
        asking({op: lambda number: frame(op, number + 1, b"")}) as client,
        pytest.raises(LinkLost, match="not asked for"),
    ):
        REQUESTS[op](client)


@pytest.mark.parametrize("op", REQUESTS)
def test_bytes_after_a_reply_end_the_link(op: Op) -> None:
    with (
        asking({op: lambda number: refusal(op, number, b"no") + b"x"}) as client,
        pytest.raises(LinkLost, match="nobody asked for"),
    ):
        REQUESTS[op](client)


@pytest.mark.parametrize("op", [op for op in REQUESTS if op not in (Op.PURGE, Op.DELETE)])
def test_a_body_that_does_not_parse_ends_the_link(op: Op) -> None:
    with (
        asking({op: lambda number: frame(op, number, b"\xff" * 96)}) as client,
        pytest.raises(LinkLost, match="parse"),
    ):
        REQUESTS[op](client)


def test_an_unknown_status_of_a_block_ends_the_link() -> None:
    with (
        asking({Op.PUT: lambda number: statuses(number, 2, 9, 2)}) as client,
        pytest.raises(LinkLost, match="unknown status"),
    ):
        put(client)


def test_statuses_of_more_or_fewer_blocks_than_were_put_end_the_link() -> None:
    for codes in ((2, 2), (2, 2, 2, 2), ()):
        with (
            asking({Op.PUT: lambda number, codes=codes: statuses(number, *codes)}) as client,  # type: ignore[misc]
            pytest.raises(LinkLost),
        ):
            put(client)


def test_more_blocks_than_were_asked_for_end_the_link() -> None:
    with (
        asking({Op.GET: lambda number: blocks(number, 4)}) as client,
        pytest.raises(LinkLost, match="other blocks"),
    ):
        get(client)


def lists(op: Op, kinds: str, *counts: int, head: bytes = b"") -> Callable[[int], bytes]:
    """A reply of `head` and lists of so many zeros, each of its kind."""
    pairs = zip(kinds, counts, strict=True)
    body = head + b"".join(struct.pack(f"<I{n}{kind}", n, *[0] * n) for kind, n in pairs)
    return lambda number: frame(op, number, body)


def leased(found: int, parts: int) -> Callable[[int], bytes]:
    """The reply to an ACQUIRE that gives a lease on so many blocks."""
    held, head = found * parts, struct.pack("<QI", 1, found)
    return lists(Op.ACQUIRE, "QQII", parts, held, held, held, head=head)


TARGET, THREE = Target(1, 0, None, CHAIN), [0, 0, 0]
SLOTS: dict[Op, Callable[[Channel, Deadline], object]] = {
    Op.RESERVE: lambda c, d: slots.reserve(c, TARGET, d),
    Op.COMMIT: lambda c, d: slots.commit(c, TARGET, d, CHAIN, THREE, THREE),
    Op.ABORT: lambda c, d: slots.abort(c, TARGET, d, CHAIN, THREE),
    Op.ACQUIRE: lambda c, d: slots.acquire(c, 1, 0, CHAIN, 1, d),
    Op.LEND: lambda c, d: c.ask(LendReply, d, _core.encode_lend, 1, 0, None),
}


@pytest.mark.parametrize(
    ("op", "answer"),
    [
        *((Op.RESERVE, lists(Op.RESERVE, "BQI", n, n, n)) for n in (0, 2, 4)),
        (Op.RESERVE, lists(Op.RESERVE, "BQI", 3, 3, 2)),
        (Op.RESERVE, lists(Op.RESERVE, "BQI", 3, 2, 3)),
        (Op.COMMIT, lists(Op.COMMIT, "B", 2)),
        (Op.ABORT, lists(Op.ABORT, "B", 4)),
        (Op.ACQUIRE, leased(4, 1)),
        (Op.ACQUIRE, leased(3, 2)),
        (Op.ACQUIRE, leased(3, 0)),
        (Op.LEND, lists(Op.LEND, "QI", 2, 1, head=struct.pack("<I", 2))),
    ],
)
def test_a_reply_about_other_slots_than_were_asked_about_ends_the_link(
    op: Op, answer: Callable[[int], bytes]
) -> None:
    deadline = Deadline(5)
    with contextlib.closing(Liar({op: answer})) as liar:
        channel = Channel(parse_url(liar.url), Credentials("client"), deadline, Access.READ)
        with pytest.raises(LinkLost, match=r"other blocks|differ in length|does not parse"):
            SLOTS[op](channel, deadline)
        assert not channel.usable
        channel.discard()


@pytest.mark.parametrize("size", [0, 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 1, 4 * BLOCK])
def test_a_payload_of_another_length_than_its_blocks_ends_the_link(size: int) -> None:
    with (
        asking({Op.GET: lambda number: blocks(number, 3, bytes(size))}) as client,
        pytest.raises(LinkLost, match="other blocks"),
    ):
        get(client)


def test_bytes_beyond_the_payload_end_the_link() -> None:
    for found in (0, 1, 2):
        with (
            asking({Op.GET: lambda number, found=found: blocks(number, found) + b"x"}) as client,  # type: ignore[misc]
            pytest.raises(LinkLost, match="nobody asked for"),
        ):
            get(client)


@pytest.mark.parametrize("piece", [1, 31, 64, 100, 1 << 20])
@pytest.mark.parametrize("found", [0, 1, 3])
def test_a_get_is_read_in_whatever_pieces_it_comes(found: int, piece: int) -> None:
    expected = [BlockStatus.OK] * found + [BlockStatus.MISSING] * (3 - found)
    with asking({Op.GET: lambda number: blocks(number, found)}, piece) as client:
        assert get(client) == expected
        assert get(client) == expected


def test_a_get_of_many_blocks_that_finds_few_gets_those_right() -> None:
    """The payload begins earlier than in the reply that was expected."""
    many = chain_of(64)
    memory = Memory(64, BLOCK)
    for k in range(64):
        memory[k] = b"\xaa" * BLOCK
    with asking({Op.GET: lambda number: blocks(number, 5)}) as client:
        got = client.get_into(MANIFEST, 0, many, range(64), memory.segments, range(64))
    assert got == [BlockStatus.OK] * 5 + [BlockStatus.MISSING] * 59
    assert memory.data[: 5 * BLOCK] == bytes(5 * BLOCK)


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_refused_get_says_why_and_the_link_lives(piece: int) -> None:
    why = b"no " * 300
    with asking({Op.GET: lambda number: refusal(Op.GET, number, why)}, piece) as client:
        for _ in range(2):
            with pytest.raises(StoreRefused, match="no no no"):
                get(client)


def test_a_broken_link_is_asked_twice_and_no_more() -> None:
    liar = Liar({Op.STATS: lambda number: frame(Op.PURGE, number, b"")})
    with (
        StoreClient(liar.url, transport="tcp", deadline_s=5) as client,
        pytest.raises(LinkLost),
    ):
        client.stats()
    assert liar.asked == [Op.HELLO, Op.STATS] * 2
    liar.close()


def test_a_handler_of_a_signal_ends_a_wait_by_raising() -> None:
    asked = threading.Event()

    def silence(number: int) -> bytes:
        asked.set()
        return b""

    def interrupt() -> None:
        asked.wait(10)
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(number: int, at: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        answers: Answers = {Op.WAIT: silence, Op.STATS: lambda n: refusal(Op.STATS, n, b"next")}
        with asking(answers) as client:
            started = time.monotonic()
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                client.wait(MANIFEST, CHAIN, 1, deadline_s=60)
            assert time.monotonic() - started < 30
            with pytest.raises(StoreRefused, match="next"):
                client.stats()  # on a new link, which has no old reply to come
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_a_reply_of_another_kind_ends_the_link_of_the_asyncio_client() -> None:
    with contextlib.closing(Liar({Op.MATCH: registered})) as liar:
        async with AsyncStoreClient(liar.url) as client:
            with pytest.raises(LinkLost, match="not asked for"):
                await client.match(MANIFEST, CHAIN)
