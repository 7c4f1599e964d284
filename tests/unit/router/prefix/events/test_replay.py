"""The router's sockets of KV events against publishers: bound, connected, repeating, restarted."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
import zmq
from tests.fakes.patience import every, until
from tests.unit.router.prefix.events.test_tracker import chain_of

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.options.types import by_engine
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.intake import EventIntake
from kvrouter.prefix.events.settings import KvEventSettings
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import PrefixIndex
from kvrouter.tools.sim.block_cache import Cleared, Event, Removed, Stored
from kvrouter.tools.sim.events import EventEncoder, EventPublisher, Faults

pytestmark = pytest.mark.slow
PATIENCE_S = 60
NO_FAULTS = Faults()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def block(number: int) -> bytes:
    return chain_of(number)


def stored(*numbers: int) -> Stored:
    """Blocks behind a parent that the router does not know: their names are taken as they are."""
    hashes = tuple(block(number) for number in numbers)
    return Stored(block(4711), hashes, (0,) * 16 * len(numbers))


def removed(*numbers: int) -> Removed:
    return Removed(tuple(block(number) for number in numbers))


def ports(bind: str | None = None, connect: int = 0, replay: int = 0) -> KvEventSettings:
    """Settings of one router, whose engines have these ports; 0: none."""
    return KvEventSettings(
        kv_events_bind=bind,
        kv_events_connect=[str(connect)] if connect else [],
        kv_events_replay=[str(replay)] if replay else [],
    )


class Router:
    """The part of a router that hears events; its ledger's `tick` runs as in the real one."""

    def __init__(self, settings: KvEventSettings) -> None:
        self.pool = EnginePool()
        self.index = PrefixIndex(100_000)
        self.tracker = CacheTracker(self.index, self.pool.find, self.pool.domain_of)
        self.pool.on_leave(self.index.clear)
        self.pool.on_join(self.tracker.engine_joined)
        self.pool.on_leave(self.tracker.engine_left)
        ports = by_engine(settings.kv_events_connect)
        replay_ports = by_engine(settings.kv_events_replay)
        self.intake = EventIntake(self.tracker, ports, replay_ports, settings.kv_events_bind)
        self.pool.on_join(self.intake.listen)
        self.engine = self.pool.add("127.0.0.1:1", Role.PREFILL)
        self._ticks = asyncio.create_task(every(0.02, self.tracker.tick))

    def join(self) -> Engine:
        self.pool.join(self.engine, Identity(("m",), None, 16))
        return self.engine

    def holds(self, *numbers: int) -> bool:
        return all(self.index.match(block(number)) for number in numbers)

    @property
    def reason(self) -> Reason:
        return self.tracker.confidence(self.engine)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition, PATIENCE_S)

    async def close(self) -> None:
        self._ticks.cancel()
        await asyncio.gather(self._ticks, return_exceptions=True)
        self.intake.close()


Start = Callable[[KvEventSettings], Router]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts routers; they end with the test."""
    made: list[Router] = []

    def begin(settings: KvEventSettings) -> Router:
        made.append(Router(settings))
        return made[-1]

    yield begin
    for each in made:
        await each.close()


@dataclass
class Engines:
    """Publishers one after the other at the same ports, as an engine that restarts has them."""

    port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    publisher: EventPublisher | None = None

    def begin(self, kept: int = 10_000, faults: Faults = NO_FAULTS) -> None:
        self.end()
        self.publisher = EventPublisher(
            f"tcp://*:{self.port}",
            "",
            16,
            replay_endpoint=f"tcp://127.0.0.1:{self.replay_port}",
            buffer_steps=kept,
            faults=faults,
            seed=1,
        )

    def end(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def tell(self, *events: Event) -> bool:
        """False, so that it may stand behind `or` in what is waited for."""
        assert self.publisher is not None
        self.publisher.publish(list(events))
        return False

    def ports(self) -> KvEventSettings:
        return ports(None, self.port, self.replay_port)


@pytest.fixture
async def engine() -> AsyncIterator[Engines]:
    made = Engines()
    made.begin()
    yield made
    made.end()


async def test_a_router_that_starts_late_learns_what_an_engine_holds(
    start: Start, engine: Engines
) -> None:
    for number in range(1, 3001):  # more than ZMQ queues for one socket
        engine.tell(stored(number))
    engine.tell(removed(7))
    router = start(engine.ports())
    router.join()
    await router.until(lambda: router.reason is Reason.COMPLETE)
    assert router.holds(1, 6, 8, 3000)
    assert not router.holds(7)
    assert router.tracker.trusts(router.engine)


def tell_ports(router: Router, events: int, replays: int) -> None:
    """The engine joins, and says itself where it publishes."""
    told = {0: (events, replays)}
    router.pool.join(router.engine, Identity(("m",), None, 16, event_ports=told))


async def test_an_engine_is_heard_where_it_says_each_time_that_it_joins(start: Start) -> None:
    router, before, after = start(ports()), Engines(), Engines()
    try:
        for engine, number in ((before, 1), (after, 2)):
            engine.begin()
            engine.tell(stored(number))
            tell_ports(router, engine.port, engine.replay_port)
            await router.until(lambda: router.reason is Reason.COMPLETE)
            assert [n for n in (1, 2) if router.holds(n)] == [number]
            router.pool.leave(router.engine, "check")
            engine.end()
    finally:
        before.end()
        after.end()


async def test_an_engine_that_is_not_heard_is_not_known_by_replays_alone(
    start: Start, engine: Engines
) -> None:
    router = start(ports())
    tell_ports(router, free_port(), engine.replay_port)
    stream = router.tracker.stream(router.engine, 0)
    assert stream is not None
    assert not stream.check()


async def test_two_routers_hear_the_same_publisher(start: Start, engine: Engines) -> None:
    routers = [start(engine.ports()), start(engine.ports())]
    for router in routers:
        router.join()
        await router.until(lambda r=router: r.reason is Reason.COMPLETE)  # type: ignore[misc]
    engine.tell(stored(1, 2))
    for router in routers:
        await until(  # a PUB may not know of its subscribers yet
            lambda r=router: r.holds(1, 2),
            meanwhile=lambda: engine.tell(stored(3)),
            look_s=0.02,
        )
        assert router.reason is Reason.COMPLETE


async def test_what_the_wire_loses_repeats_and_reorders_is_made_good(
    start: Start, engine: Engines
) -> None:
    engine.begin(faults=Faults(lost=20, repeated=20, late=20))
    router = start(engine.ports())
    router.join()
    await router.until(lambda: router.reason is Reason.COMPLETE)
    for number in range(1, 501):
        engine.tell(stored(number))
        if number % 3 == 0:
            engine.tell(removed(number - 1))
        if number % 50 == 0:
            await asyncio.sleep(0)
    last = count(1001)
    await until(  # what is lost is noticed by what follows
        lambda: router.reason is Reason.COMPLETE and router.holds(500),
        PATIENCE_S,
        meanwhile=lambda: engine.tell(stored(next(last))),
        look_s=0.02,
    )
    kept = [n for n in range(1, 501) if n % 3 != 2 or n == 500]
    assert [n for n in range(1, 501) if router.holds(n)] == kept
    assert router.tracker.counts["gaps"]


async def test_a_replay_that_does_not_reach_back_leaves_only_what_is_certain(
    start: Start, engine: Engines
) -> None:
    engine.begin(kept=3)
    for number in range(1, 10):
        engine.tell(stored(number))
    router = start(engine.ports())
    router.join()
    await router.until(lambda: router.reason is Reason.LATE)
    assert [n for n in range(1, 10) if router.holds(n)] == [7, 8, 9]
    await until(
        lambda: router.reason is Reason.COMPLETE,
        PATIENCE_S,
        meanwhile=lambda: engine.tell(Cleared()),
        look_s=0.02,
    )
    assert not router.holds(9)


async def test_an_engine_that_restarts_is_learnt_again(start: Start, engine: Engines) -> None:
    router = start(engine.ports())
    router.join()
    engine.tell(stored(1, 2))
    await router.until(lambda: router.holds(1) or engine.tell(stored(3)))
    engine.begin()
    engine.tell(stored(5))
    await router.until(lambda: router.holds(5) and router.reason is Reason.COMPLETE)
    assert not router.holds(1)
    assert not router.holds(2)


async def test_an_engine_with_a_broken_connection_is_not_trusted_until_its_next_message(
    start: Start, engine: Engines
) -> None:
    router = start(ports(None, engine.port))  # no port for replays
    router.join()
    await router.until(lambda: router.holds(1) or engine.tell(stored(1)))
    assert router.tracker.trusts(router.engine)
    engine.end()
    await router.until(lambda: router.reason is Reason.CUT)
    assert router.holds(1)
    assert not router.tracker.trusts(router.engine)
    engine.begin()
    await router.until(lambda: router.holds(2) or engine.tell(stored(2)))
    await router.until(lambda: router.tracker.trusts(router.engine))
    assert not router.holds(1)


async def test_a_publisher_that_does_not_answer_is_said_to(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    bind = f"tcp://127.0.0.1:{free_port()}"
    router = start(ports(bind, 0, free_port()))
    router.join()
    publisher = EventPublisher(bind, "kv@127.0.0.1:1", 16)
    try:
        with caplog.at_level(logging.WARNING):
            number = count(1)
            await until(
                lambda: router.tracker.counts["messages"],
                meanwhile=lambda: publisher.publish([stored(next(number))]),
                look_s=0.01,
            )
            await router.until(lambda: router.tracker.counts["unanswered"])
        assert "does not replay" in caplog.text
        publisher.publish([stored(9999)])
        await router.until(lambda: router.holds(9999))
        assert router.reason in (Reason.LATE, Reason.COMPLETE)
    finally:
        publisher.close()


@pytest.fixture
def old_publisher() -> Iterator[tuple[int, zmq.Socket[bytes]]]:
    """The replay socket of a publisher that sends no topic, as older ones."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    yield router.bind_to_random_port("tcp://127.0.0.1"), router
    context.destroy(linger=0)


async def test_answers_without_a_topic_are_read(
    start: Start, old_publisher: tuple[int, zmq.Socket[bytes]]
) -> None:
    port, publisher = old_publisher
    router = start(ports("tcp://127.0.0.1:0", 0, port))
    router.join()
    asked = await asyncio.to_thread(publisher.recv_multipart)
    assert asked[1:] == [b"", bytes(8)]
    encoded = _payload(stored(1, 2))
    publisher.send_multipart([asked[0], b"", struct.pack(">Q", 0), encoded])
    publisher.send_multipart([asked[0], b"", struct.pack(">q", -1), b""])
    await router.until(lambda: router.reason is Reason.COMPLETE)
    assert router.holds(1, 2)


def _payload(event: Event) -> bytes:
    return EventEncoder(16).frames(b"", [event])[2]
