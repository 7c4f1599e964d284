"""What nodes publish and what a router makes of it, against a model of a node.

Messages are lost, repeated and overtaken, queues overflow, nodes and routers start anew.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvrouter.prefix.events.sequencer import CHECK_S
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import MAX_ENGINES, PrefixIndex
from kvrouter.prefix.stores.node_index import NodeMapping
from kvrouter_store.node.block_events import BlockEvents

A, B = (sha256(name).digest() for name in (b"A", b"B"))  # manifests of one spec
NAMES = [sha256(bytes([number])).digest() for number in range(12)]
KEPT = 5
Held = set[tuple[bytes, bytes]]


class Change(NamedTuple):
    stored: bool
    manifest: bytes
    hash: bytes


@dataclass
class FakeServer:
    """A node's feed: what is true of a queued name is looked up when the name is taken."""

    held: Held = field(default_factory=set)
    queue: dict[bytes, None] = field(default_factory=dict)
    lost: bool = False

    def restart_feed(self) -> None:
        self.queue |= dict.fromkeys(sorted({name for _, name in self.held}))

    def take(self, most: int) -> tuple[list[Change], bool]:
        lost, self.lost = self.lost, False
        names = list(self.queue)[:most]
        for name in names:
            del self.queue[name]
        return [Change((m, n) in self.held, m, n) for n in names for m in (A, B)], lost


@dataclass
class FakeSockets:
    """A wire to one subscriber."""

    kept: deque[list[bytes]] = field(default_factory=lambda: deque(maxlen=KEPT))
    wire: list[list[bytes]] = field(default_factory=list)
    on_replay: Callable[[bytes], None] = lambda start: None

    def send(self, message: list[bytes]) -> None:
        self.wire.append(message)


class Router:
    """The index of one node, and the requests for replays, if there can be any."""

    def __init__(self, *, replays: bool) -> None:
        self.replays = replays
        self.clock, self.index = Clock(), PrefixIndex(1000)
        self.mapping = NodeMapping(self.index)
        self.tracker = CacheTracker(
            self.index, lambda _: None, lambda _: None, clock=self.clock, mapping=self.mapping
        )
        self.node = Engine("n:1", Role.STORE, identity=Identity(()))
        self.asked: int | None = None
        self.tracker.replays = self
        self.tracker.engine_joined(self.node)

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        self.asked = start if self.replays else None
        return self.replays

    @property
    def complete(self) -> bool:
        return self.tracker.confidence(self.node) is Reason.COMPLETE

    def held(self) -> Held:
        holders = self.mapping.holders(self.node)
        return {
            (bytes.fromhex(manifest), name)
            for name in NAMES
            for manifest, holder in holders.items()
            if self.index.match(name).get(holder)
        }


class NodeAndRouter(RuleBasedStateMachine):
    @initialize(replays=st.booleans())
    def begin(self, replays: bool) -> None:
        self.starts = 0
        self.start(set(), later=True)
        self.router = Router(replays=replays)

    def start(self, held: Held, *, later: bool) -> None:
        self.server, self.sockets = FakeServer(held), FakeSockets()
        self.starts += 1
        life = (1 << 22) + (self.starts if later else -self.starts)
        self.events = BlockEvents(
            self.sockets,  # type: ignore[arg-type]
            "kv@n:1",
            self.server.restart_feed,
            life << 41,
        )

    @rule(name=st.sampled_from(NAMES), manifest=st.sampled_from([A, B]))
    def put(self, name: bytes, manifest: bytes) -> None:
        self.server.held.add((manifest, name))
        self.server.queue[name] = None

    @rule(name=st.sampled_from(NAMES))
    def lose_block(self, name: bytes) -> None:
        self.server.held -= {(A, name), (B, name)}
        self.server.queue[name] = None

    @rule()
    def overflow(self) -> None:
        self.server.queue.clear()
        self.server.lost = True

    @rule(most=st.integers(1, 4))
    def take(self, most: int) -> None:
        changes, lost = self.server.take(most)
        self.events.take(changes, lost=lost, more=bool(self.server.queue))  # type: ignore[arg-type]

    @precondition(lambda self: self.sockets.wire)
    @rule(arrives=st.sampled_from(["once", "twice", "never", "late"]))
    def deliver(self, arrives: str) -> None:
        wire = self.sockets.wire
        if arrives == "late" and len(wire) > 1:
            wire[:2] = reversed(wire[:2])
        message = wire.pop(0)
        for _ in range({"never": 0, "twice": 2}.get(arrives, 1)):
            self.router.tracker.receive_from(self.router.node, message)

    @rule()
    def answer(self) -> None:
        router = self.router
        if router.asked is None:
            return
        start, router.asked = router.asked.to_bytes(8, "big"), None
        self.sockets.on_replay(start)
        for _, number, payload in list(self.sockets.kept):
            if number >= start:
                router.tracker.replayed(router.node, 0, int.from_bytes(number, "big"), payload)
        router.tracker.replay_ended(router.node, 0)

    @rule(seconds=st.sampled_from([0.3, 2.0, CHECK_S + 1]))
    def wait(self, seconds: float) -> None:
        self.router.clock.now += seconds
        self.router.tracker.tick()

    @rule()
    def cut(self) -> None:
        self.sockets.wire.clear()
        self.router.tracker.disconnected(self.router.node)
        self.router.tracker.connected(self.router.node)

    @rule(keeps=st.booleans(), later=st.booleans())
    def restart_node(self, keeps: bool, later: bool) -> None:
        self.start(self.server.held if keeps else set(), later=later)
        self.cut()

    @rule()
    def restart_router(self) -> None:
        self.sockets.wire.clear()
        self.router = Router(replays=self.router.replays)

    @rule()
    def come_to_rest(self) -> None:
        self.put(NAMES[0], A)  # shows what was lost before it
        for _ in range(20 if self.router.replays else 2):
            while self.server.queue or self.server.lost:
                self.take(4)
            self.take(4)
            while self.sockets.wire:
                self.deliver("once")
            self.answer()
            self.wait(CHECK_S + 1)
            if self.router.complete and self.router.asked is None and not self.sockets.wire:
                break
        assert self.router.complete or not self.router.replays
        assert self.router.held() == self.server.held or not self.router.complete

    def teardown(self) -> None:
        if hasattr(self, "router"):
            self.come_to_rest()


TestNodeAndRouter = NodeAndRouter.TestCase
TestNodeAndRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("later", [True, False])
def test_a_replay_tells_all_of_a_restarted_node_whether_its_numbers_are_higher_or_lower(
    later: bool,
) -> None:
    fleet = NodeAndRouter()
    fleet.begin(replays=True)
    for name in NAMES[:8]:
        fleet.put(name, A)
    fleet.take(8)
    fleet.answer()
    fleet.restart_node(keeps=True, later=later)  # the router asks from the old life's number on
    for _ in range(4):
        fleet.take(3)
    fleet.sockets.wire.clear()
    for _ in range(2):  # after an empty answer it asks from 0 on
        fleet.answer()
    assert fleet.router.complete
    assert fleet.router.held() == fleet.server.held


def told(manifest: bytes | None, *names: bytes) -> BlockStored:
    return BlockStored(list(names), None, msgspec.Raw(b"\x90"), 16, manifest=manifest)


def make_node(
    blocks: int = 1000,
) -> tuple[PrefixIndex, CacheTracker, Engine, Callable[..., None]]:
    """An index, the tracker over it, a node, and what applies its events."""
    index = PrefixIndex(blocks)
    mapping = NodeMapping(index)
    tracker = CacheTracker(index, lambda _: None, lambda _: None, mapping=mapping)
    node = Engine("n:1", Role.STORE, identity=Identity(()))
    numbers = iter(range(1 << 20))

    def send(*events: object) -> None:
        payload = msgspec.msgpack.encode([1.5, events, 0])
        tracker.receive_from(node, [b"", next(numbers).to_bytes(8, "big"), payload])
        tracker.tick()

    return index, tracker, node, send


def test_blocks_of_more_manifests_than_fit_make_their_node_one_that_is_asked() -> None:
    _, tracker, node, send = make_node()
    for number in range(MAX_ENGINES):
        send(told(number.to_bytes(2) * 16, NAMES[0]))
    assert tracker.confidence(node) is Reason.COMPLETE
    send(told(b"\xff" * 32, NAMES[0]))
    assert tracker.confidence(node) is Reason.UNNAMED
    send(AllBlocksCleared(), told(A, NAMES[0]))
    assert tracker.confidence(node) is Reason.COMPLETE


def test_a_node_of_which_the_index_has_forgotten_blocks_is_asked() -> None:
    _, tracker, node, send = make_node(blocks=4)
    send(told(A, *NAMES[:4]))
    assert tracker.confidence(node) is Reason.COMPLETE
    send(told(A, *NAMES[4:6]))
    assert tracker.confidence(node) is Reason.FULL


def test_what_is_no_block_of_a_manifest_is_not_taken_for_one() -> None:
    index, tracker, node, send = make_node()
    send(told(A, NAMES[0]), BlockRemoved([NAMES[0]]), BlockRemoved([NAMES[0]], manifest=B))
    assert list(index.match(NAMES[0]).values()) == [1]
    send(told(None, NAMES[1]))
    assert tracker.confidence(node) is Reason.UNNAMED
