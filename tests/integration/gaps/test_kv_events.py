"""No publisher of KV events keeps the router's loop from its streams, whatever it sends."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq
from tests.fakes.patience import until
from tests.integration.gaps.meter import MOST_S, GapMeter
from tests.unit.router.conftest import joined
from tests.unit.router.prefix.events.test_tracker import BLOCK, Wire, make_wire, removed, stored

from kvrouter.engines.engine import Role
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.intake import EventSubscriber, Replayer
from kvrouter.prefix.events.messages import MAX_BLOCKS, MAX_EVENTS
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter_store.events.sockets import MAX_MESSAGE_BYTES, Turns, open_context

TOPIC = b"kv@e:1"
Payload = Callable[[], bytes]
PATIENCE_S = 60
encode = msgspec.msgpack.encode


def batch(*events: Any) -> bytes:
    return encode([1.0, list(events), 0])


def names(blocks: int) -> list[int]:
    return [number * 0x9E3779B97F4A7C15 % (1 << 64) for number in range(1, blocks + 1)]


def whole_prompt() -> bytes:
    """As many blocks as fit, with names that the router must map by the token ids."""
    blocks = MAX_MESSAGE_BYTES // (9 + 5 * BLOCK) - 16
    return batch(stored(names(blocks), [70_000] * blocks * BLOCK, extra_keys=None))


def plausible() -> bytes:
    return batch(stored(names(16_384), list(range(16_384 * BLOCK)), extra_keys=None))


WITHIN: dict[str, Payload] = {
    "blocks of one prompt": whole_prompt,
    "the most blocks": lambda: batch(stored(names(MAX_BLOCKS), [])),
    "the most blocks, removed": lambda: batch(removed(names(MAX_BLOCKS))),
    "whole hashes": lambda: batch(stored([b"%032d" % n for n in range(MAX_BLOCKS)], [])),
    "the most events": lambda: batch(*[removed([])] * MAX_EVENTS),
    "the most stored events": lambda: batch(*[["BlockStored", [7], None, [], 16]] * MAX_EVENTS),
    "the most unknown events": lambda: batch(*[7] * MAX_EVENTS),
    "events with unknown fields": lambda: batch(*[["Strange", 7, [[]] * 8]] * MAX_EVENTS),
    "emptied again and again": lambda: batch(
        *[["AllBlocksCleared"], ["BlockStored", [7], None, [], 16]] * (MAX_EVENTS // 2)
    ),
    "extra keys": lambda: batch(stored([7], [0] * BLOCK, extra_keys=[[]] * 2_000_000)),
    "an unknown field": lambda: batch(stored([7], [0] * BLOCK, new=[[[]]] * 600_000)),
    "a field of another type": lambda: batch(stored([7], [0] * BLOCK, medium=[[]] * 2_000_000)),
    "a long name": lambda: batch(stored([b"x" * 8_000_000], [0] * BLOCK)),
    "a long text": lambda: batch(stored([7], [0] * BLOCK, lora_name="é" * 4_000_000)),
    "token ids of one block": lambda: batch(stored([7], [0] * 2_000_000)),
    "huge blocks": lambda: batch(stored(names(4096), [1], block_size=1 << 62)),
}
BEYOND: dict[str, Payload] = {
    "too many blocks": lambda: batch(stored(names(MAX_BLOCKS + 1), [])),
    "too many events": lambda: batch(*[7] * (MAX_EVENTS + 1)),
    "too many values": lambda: batch(stored([7], [], new=[[]] * 3_000_000)),
    "too deep": lambda: b"\x92\x01" + b"\x91" * 1_000_000 + b"\x90",
    "nothing but depth": lambda: b"\x91" * 1_000_000,
    "lengths that lie": lambda: b"\x92\x01\x91\xdd\xff\xff\xff\xff" + b"\x90" * 1_000_000,
}


class Publisher:
    """A hostile publisher, connected to a router's part that hears events."""

    def __init__(self, wire: Wire, socket: "zmq.Socket[bytes]") -> None:
        self.wire = wire
        self._socket = socket
        self._numbers = count()

    async def send(self, payload: bytes, topic: bytes = TOPIC) -> None:
        frames = [topic, struct.pack(">Q", next(self._numbers)), payload]
        await asyncio.to_thread(self._socket.send_multipart, frames)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, PATIENCE_S)

    async def resent(self, before: int) -> None:
        """Send until the router has more messages than before: until both are connected."""
        counts = self.wire.tracker.counts
        await until(
            lambda: counts["messages"] != before,
            PATIENCE_S,
            meanwhile=lambda: self.send(batch()),
            look_s=0.02,
        )

    async def heard(self) -> None:
        """Return when the router has applied all that was sent before."""
        tracker, before = self.wire.tracker, self.wire.tracker.counts["unknown_topic"]
        await self.send(b"", topic=b"kv@nobody:1")
        await self.until(lambda: tracker.counts["unknown_topic"] > before)


@asynccontextmanager
async def publishing() -> AsyncIterator[Publisher]:
    wire, context = make_wire(blocks=1_000_000), open_context()
    wire.tracker = CacheTracker(wire.index, wire.pool.find, wire.pool.domain_of)
    turns = Turns(wire.tracker.work)
    wire.tracker.wake = turns.wake
    subscriber = EventSubscriber("tcp://127.0.0.1:0", wire.tracker, context, turns)
    socket = context.socket(zmq.PUB)
    socket.connect(subscriber.endpoint)
    made = Publisher(wire, socket)
    try:
        await made.resent(0)  # a PUB drops what precedes the subscription
        await made.send(plausible())  # memory that is touched for the first time takes longer
        await made.heard()
        yield made
    finally:
        subscriber.close()
        context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    async with publishing() as made:
        yield made


def rows(payloads: dict[str, Payload]) -> list[Any]:
    return [pytest.param(payload, id=name) for name, payload in payloads.items()]


@pytest.mark.parametrize("payload", rows(WITHIN))
async def test_the_worst_message_within_the_bounds_takes_many_short_turns(
    publisher: Publisher, payload: Payload
) -> None:
    message, counts = payload(), publisher.wire.tracker.counts
    assert len(message) <= MAX_MESSAGE_BYTES
    async with GapMeter() as meter:
        for _ in range(2):
            await publisher.send(message)
        await publisher.heard()
    assert meter.longest_s < MOST_S
    assert counts["too_large"] == counts["malformed"] == 0


@pytest.mark.parametrize("payload", rows(BEYOND))
async def test_a_message_beyond_the_bounds_is_dropped_and_its_publisher_not_trusted(
    publisher: Publisher, payload: Payload, caplog: pytest.LogCaptureFixture
) -> None:
    message, tracker, engine = payload(), publisher.wire.tracker, publisher.wire.engine
    assert tracker.trusts(engine)
    async with GapMeter() as meter:
        await publisher.send(message)
        await publisher.heard()
    assert meter.longest_s < MOST_S
    assert tracker.counts["too_large"] + tracker.counts["malformed"] == 1
    assert tracker.confidence(engine) is Reason.CUT
    assert caplog.text.count("a message is dropped") == 1


async def test_a_flood_of_plausible_messages_leaves_the_loop_two_thirds_of_its_time(
    publisher: Publisher,
) -> None:
    message = plausible()
    async with GapMeter() as meter:
        for _ in range(50):
            await publisher.send(message)
        await publisher.heard()
    assert meter.longest_s < MOST_S


async def test_a_message_of_too_many_bytes_never_reaches_the_loop(publisher: Publisher) -> None:
    counts = publisher.wire.tracker.counts
    before = counts["messages"]
    async with GapMeter() as meter:
        await publisher.send(bytes(MAX_MESSAGE_BYTES + 1))  # ZMQ ends the connection
        await publisher.resent(before)
    assert meter.longest_s < MOST_S
    assert counts["malformed"] == counts["too_large"] == 0


@pytest.mark.parametrize("payload", rows(WITHIN | BEYOND))
async def test_a_replay_takes_short_turns_too(payload: Payload) -> None:
    context = open_context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    wire = make_wire(blocks=1_000_000)
    wire.tracker = tracker = CacheTracker(wire.index, wire.pool.find, wire.pool.domain_of)
    turns = Turns(tracker.work)
    tracker.wake = turns.wake
    replayer = Replayer(lambda: context, {"": port}, tracker, turns, answer_s=PATIENCE_S)
    tracker.replays = replayer
    message = payload()
    try:
        engine = joined(wire.pool, "127.0.0.1:9", Role.PREFILL, block_tokens=BLOCK)
        wire.index.stored(engine, names(4096))  # touches all its memory
        tracker.engine_joined(engine)
        asker = (await asyncio.to_thread(server.recv_multipart))[0]
        async with GapMeter() as meter:
            for number in range(2):
                frames = [asker, b"", b"", struct.pack(">Q", number), message]
                await asyncio.to_thread(server.send_multipart, frames)
            await asyncio.to_thread(
                server.send_multipart, [asker, b"", b"", struct.pack(">q", -1), b""]
            )
            await until(
                lambda: (stream := tracker.stream(engine, 0)) and not stream.asking, PATIENCE_S
            )
        assert meter.longest_s < MOST_S
    finally:
        replayer.close()
        context.destroy(linger=0)
