"""The router's end of KV events: a bound socket to which engines' publishers connect."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
import zmq
from tests.fakes.patience import until
from tests.unit.router.prefix.events.test_tracker import (
    IDS,
    TOKENS,
    Wire,
    make_wire,
    payload,
    removed,
    stored,
)

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.intake import EventConnector, EventSubscriber, Replayer
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import PrefixIndex
from kvrouter_store.events.sockets import Turns, open_context


@pytest.fixture
def wire() -> Wire:
    return make_wire()


@pytest.fixture
async def subscriber(wire: Wire) -> AsyncIterator[EventSubscriber]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = EventSubscriber("tcp://127.0.0.1:0", wire.tracker, context, Turns(wire.tracker.work))
    yield made
    made.close()
    context.destroy(linger=0)


async def test_events_of_a_publisher_that_connects_are_applied_in_both_encodings(
    wire: Wire, subscriber: EventSubscriber
) -> None:
    """As vLLM does it: the engine's PUB socket connects to the router's."""
    context = zmq.Context()
    try:
        publisher = context.socket(zmq.PUB)
        publisher.set_hwm(100_000)  # vLLM's default; ZMQ's own drops beyond 1,000
        publisher.connect(subscriber.endpoint)
        numbers = count()

        def publish(*events: Any) -> None:
            number = struct.pack(">Q", next(numbers))
            publisher.send_multipart([b"kv@e:1", number, payload(*events)])

        counts = wire.tracker.counts
        await until(lambda: counts["messages"], meanwhile=publish)  # a PUB drops the first ones
        events = [
            stored(IDS[:2], TOKENS[:32]),
            ["BlockStored", IDS[2:], IDS[1], TOKENS[32:], 16, None],
        ]
        for event in events:
            publish(event)
        for _ in range(1000):
            publish()
        publish(removed(IDS[3:]))
        await until(lambda: wire.matched() == 3)
        assert counts["gaps"] == counts["malformed"] == 0
    finally:
        context.destroy(linger=0)


async def test_an_address_in_use_is_an_os_error_that_names_the_flag(
    wire: Wire, subscriber: EventSubscriber
) -> None:
    with pytest.raises(OSError, match="--kv-events-bind"):
        EventSubscriber(subscriber.endpoint, wire.tracker, zmq.Context.instance(), Turns())
    subscriber.close()
    subscriber.close()


class OddTracker:
    """Fails at every message."""

    def __init__(self) -> None:
        self.seen: list[Sequence[bytes]] = []

    def receive(self, frames: Sequence[bytes]) -> None:
        self.seen.append(frames)
        raise RuntimeError("odd")


async def test_a_message_that_cannot_be_applied_does_not_stop_those_behind_it() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tracker = OddTracker()
    subscriber = EventSubscriber("tcp://127.0.0.1:0", tracker, context, Turns())  # type: ignore[arg-type]
    try:
        publisher = context.socket(zmq.PUB)
        publisher.connect(subscriber.endpoint)
        frames = [b"kv@e:1", bytes(8), payload()]
        await until(
            lambda: len(tracker.seen) >= 3, meanwhile=lambda: publisher.send_multipart(frames)
        )
    finally:
        subscriber.close()
        context.destroy(linger=0)


async def test_messages_that_come_one_by_one_are_all_taken(
    wire: Wire, subscriber: EventSubscriber
) -> None:
    """Each may come just as the socket was found empty: no wake-up may be lost."""
    context = zmq.Context()
    try:
        publisher = context.socket(zmq.PUB)
        publisher.connect(subscriber.endpoint)
        counts, sent = wire.tracker.counts, 0

        def publish() -> None:
            nonlocal sent
            publisher.send_multipart([b"kv@e:1", struct.pack(">Q", sent), payload()])
            sent += 1

        await until(lambda: counts["messages"], meanwhile=publish)  # a PUB drops the first ones
        missed = sent - counts["messages"]
        for number in range(300):
            publish()
            await asyncio.sleep(number % 7 * 0.001)
        await until(lambda: counts["messages"] >= sent - missed)
        assert counts["gaps"] == 0
    finally:
        context.destroy(linger=0)


def test_there_are_sockets_for_the_publishers_of_thousands_of_engines() -> None:
    context = open_context()
    assert int(context.get(zmq.MAX_SOCKETS)) > 4 * 10_000
    context.destroy()


async def test_an_engine_for_which_no_socket_is_left_is_one_without_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 5)  # one engine takes three, and a fourth while it is asked
    tracker = CacheTracker(PrefixIndex(1024), lambda _: None, lambda _: None)
    connector = EventConnector(lambda: context, {"": 9}, tracker, Turns())
    replayer = Replayer(lambda: context, {"": 9}, tracker, Turns())
    tracker.replays = replayer
    first, second = (Engine(f"127.0.0.1:{p}", Role.DECODE, identity=Identity(())) for p in (1, 2))
    try:
        for engine in (first, second):
            tracker.engine_joined(engine)
            connector.engine_joined(engine)
        assert "KV events of 127.0.0.1:2 are not taken: Too many open files" in caplog.text
        assert tracker.stream(second, 0) is None  # nor is it exact by a replay alone
        assert tracker.confidence(second) is Reason.NO_EVENTS
        assert not replayer.ask(Engine("127.0.0.1:3", Role.DECODE), 0, 0)
        assert tracker.counts["unasked"] == 1
        connector.forget(first)
        replayer.close()

        def join_again() -> None:  # ZMQ closes sockets in its own time
            tracker.engine_joined(second)
            connector.engine_joined(second)

        await until(lambda: tracker.stream(second, 0), meanwhile=join_again)
    finally:
        connector.close()
        replayer.close()
        context.destroy(linger=0)
