"""The index against the truth: one publisher, and everything that can happen to its messages.

The model is the engine: what it holds after each message, in each of its lives. The wire loses,
repeats and reorders; replays are cut short; both sides restart. What the router claims and trusts
must have been true after the message that it applied last, and all must be well again at the end.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.router.conftest import Clock, joined
from tests.unit.router.prefix.events.test_tracker import chain_of, payload, removed, stored

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.events.confidence import IndexState, Reason
from kvrouter.prefix.events.sequencer import CHECK_S, TRIES
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import PrefixIndex

BLOCKS = range(1, 5)
CLEARED = {"type": "AllBlocksCleared"}


@dataclass
class Life:
    """An engine from one start to the next: its messages, and what it held after each."""

    messages: list[bytes] = field(default_factory=list)
    held: list[frozenset[int]] = field(default_factory=list)

    def now(self) -> frozenset[int]:
        return self.held[-1] if self.held else frozenset()


@dataclass
class Asked:
    """Stands for the sockets of replays: remembers what is asked."""

    possible: bool
    start: int | None = None
    answering: bool = False

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        if self.possible:
            self.start, self.answering = start, False
        return self.possible


class Truth(RuleBasedStateMachine):
    clock: Clock

    @initialize(replays=st.booleans(), kept=st.sampled_from([0, 2, 5, 1000]))
    def begin(self, replays: bool, kept: int) -> None:
        self.clock, self.kept = Clock(), kept
        self.lives = [Life()]
        self.wire: list[tuple[int, int]] = []  # (life, number) in flight
        self.asked = Asked(replays)
        self.broken = False  # the publisher that answered is gone
        self.answers: list[tuple[int, int]] = []
        self.time = 0.0
        self.start_router()

    def start_router(self) -> None:
        self.asked.start, self.asked.answering = None, False
        self.heard = (-1, -1)
        self.index = PrefixIndex(1000)
        self.pool = EnginePool(self.clock)
        self.tracker = CacheTracker(
            self.index, self.pool.find, self.pool.domain_of, clock=self.clock
        )
        self.tracker.replays = self.asked
        self.pool.on_leave(self.index.clear)
        self.pool.on_join(self.tracker.engine_joined)
        self.pool.on_leave(self.tracker.engine_left)
        self.engine = joined(self.pool, "e:1", Role.PREFILL, block_tokens=16)

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def publish(self, events: Sequence[object], held: frozenset[int]) -> None:
        self.time += 1.0
        ts = struct.pack(">d", self.time)
        self.life.messages.append(payload(*events).replace(struct.pack(">d", 1.5), ts, 1))
        self.life.held.append(held)
        self.wire.append((len(self.lives) - 1, len(self.life.messages) - 1))

    # -- the engine

    @rule(blocks=st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=3))
    def stores(self, blocks: set[int]) -> None:
        named = sorted(blocks)
        event = stored(named, [0] * 16 * len(named), parent=4711)
        self.publish([event], self.life.now() | blocks)

    @rule(blocks=st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=3))
    def removes(self, blocks: set[int]) -> None:
        self.publish([removed(sorted(blocks))], self.life.now() - blocks)

    @rule(blocks=st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=3), lost=st.integers(0, 2))
    def turns_over(self, blocks: set[int], lost: int) -> None:
        """Stores, removes and stores again; of the last three messages some are lost."""
        self.stores(blocks)
        self.arrive(count=len(self.wire), twice=False)
        self.removes(blocks)
        self.stores(set(BLOCKS) - blocks)
        del self.wire[:lost]

    @precondition(lambda self: len(self.life.messages) > 6)
    @rule()
    def clears(self) -> None:
        self.publish([CLEARED], frozenset())

    @precondition(lambda self: len(self.life.messages) > 6)
    @rule(noticed=st.booleans())
    def restarts(self, noticed: bool) -> None:
        self.lives.append(Life())
        self.broken = self.asked.answering
        if noticed:  # the health check saw it go and come
            self.pool.leave(self.engine)
            self.wire.clear()
            self.heard = (-1, -1)
            joined(self.pool, "e:1", Role.PREFILL, block_tokens=16)

    # -- the wire

    def deliver(self, life: int, number: int) -> None:
        if number and life > self.heard[0] >= 0 and number == self.following():
            return  # the one case that numbers cannot tell: as if it were lost, too
        self.heard = max(self.heard, (life, number))
        sequence = struct.pack(">Q", number)
        self.tracker.receive([b"kv@e:1", sequence, self.lives[life].messages[number]])

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 4), twice=st.booleans())
    def arrive(self, count: int, twice: bool) -> None:
        for each in self.wire[:count]:
            for _ in range(1 + twice):
                self.deliver(*each)
        del self.wire[:count]

    @precondition(lambda self: len(self.wire) > 1)
    @rule(first=st.integers(1, 3))
    def overtakes(self, first: int) -> None:
        one = self.wire[min(first, len(self.wire) - 1)]
        if one[0] == self.wire[0][0]:  # (one connection ends before the next one begins)
            self.wire.remove(one)
            self.deliver(*one)

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 4))
    def loses(self, count: int) -> None:
        del self.wire[:count]

    # -- replays

    @precondition(lambda self: self.asked.start is not None)
    @rule()
    def replay_begins(self) -> None:
        start, self.asked.start = self.asked.start, None
        assert start is not None
        last, life = len(self.life.messages), len(self.lives) - 1
        self.wire = [each for each in self.wire if each[0] == life]  # the rest went with its sender
        self.answers = [(life, each) for each in range(max(start, last - self.kept), last)]
        self.asked.answering, self.broken = True, False

    @precondition(lambda self: self.asked.answering)
    @rule(count=st.integers(1, 8), dropped=st.booleans())
    def replay_goes_on(self, count: int, dropped: bool) -> None:
        """`dropped`: ZMQ's queue was full, as it can be after the first answers."""
        for each in range(count):
            if not self.asked.answering:
                return  # a new replay was requested: the rest goes to a closed socket
            if self.broken:
                self.replay_breaks()
                return
            if not self.answers:
                self.asked.answering = False
                self.tracker.replay_ended(self.engine, 0)
                return
            life, number = self.answers.pop(0)
            if not (dropped and each == 1 and self.answers):
                if self.listens():  # (it hears nothing of what it no longer wants to know)
                    self.heard = max(self.heard, (life, number))
                self.tracker.replayed(self.engine, 0, number, self.lives[life].messages[number])

    @rule(
        blocks=st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=3),
        count=st.integers(1, 5),
        dropped=st.booleans(),
    )
    def is_asked_what_was_lost(self, blocks: set[int], count: int, dropped: bool) -> None:
        """All was well; then nothing arrives until the router asks, and gets the first answers."""
        self.heal()
        self.stores(blocks)
        self.removes(blocks)
        self.stores(set(BLOCKS) - blocks)
        self.loses(count=len(self.wire))
        self.waits(CHECK_S)
        if self.asked.start is not None:
            self.replay_begins()
            self.replay_goes_on(count, dropped)

    @precondition(lambda self: self.asked.answering)
    @rule()
    def replay_breaks(self) -> None:
        self.asked.answering = False
        self.tracker.replay_failed(self.engine, 0)

    @precondition(lambda self: self.asked.start is not None)
    @rule()
    def is_not_answered(self) -> None:
        self.asked.start = None
        self.tracker.replay_failed(self.engine, 0)

    # -- the router

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0, 40.0]))
    def waits(self, seconds: float) -> None:
        self.clock.now += seconds
        self.tracker.tick()

    @precondition(lambda self: len(self.life.messages) > 6)
    @rule()
    def router_restarts(self) -> None:
        self.start_router()

    @rule()
    def connection_breaks(self) -> None:
        self.wire.clear()
        self.tracker.disconnected(self.engine)
        self.tracker.connected(self.engine)

    # -- what must hold

    def claims(self) -> frozenset[int]:
        return frozenset(block for block in BLOCKS if self.index.match(chain_of(block)))

    def following(self) -> int | None:
        stream = self.tracker.stream(self.engine, 0)
        return stream.next if stream else None

    def listens(self) -> bool:
        stream = self.tracker.stream(self.engine, 0)
        return stream is not None and stream.asking

    @invariant()
    def doubt_is_known_at_once(self) -> None:
        stream = self.tracker.stream(self.engine, 0)
        if stream is not None and not stream.reason.trusted:
            assert not self.tracker.trusts(self.engine), stream.reason

    @invariant()
    def what_is_trusted_is_true(self) -> None:
        if not self.tracker.trusts(self.engine):
            return
        following, claims = self.following(), self.claims()
        assert following is not None
        if following == 0:
            assert not claims
            return
        life, heard = self.heard  # no trusted engine may hold what this message removed
        assert following == heard + 1
        held = self.lives[life].held[heard]
        exact = self.tracker.confidence(self.engine) is Reason.COMPLETE
        assert claims == held if exact else claims <= held

    def heal(self) -> None:
        while self.wire:
            self.arrive(count=4, twice=False)
        for _ in range(20):
            for _ in range(200):
                if self.asked.start is not None:
                    self.replay_begins()
                if self.asked.answering:
                    self.replay_goes_on(count=8, dropped=False)
            self.waits(1.0)

    def teardown(self) -> None:
        if not hasattr(self, "lives"):
            return
        self.heal()
        for block in (1, 2):  # what is lost is noticed by what follows
            self.publish([stored([block], [0] * 16, parent=4711)], self.life.now() | {block})
            self.heal()
        for _ in range(2):  # it is asked what is new, and as it answers, for all that was before
            self.waits(CHECK_S)
            self.heal()
        reason = self.tracker.confidence(self.engine)
        assert reason.trusted, reason
        if self.asked.possible and self.kept >= len(self.life.messages):
            assert reason.state is IndexState.EXACT, reason
        assert self.claims() <= self.life.now()
        if reason.state is not IndexState.EXACT:
            self.publish([CLEARED], frozenset())
            self.publish([stored([2, 3], [0] * 32, parent=4711)], frozenset({2, 3}))
            self.heal()
        assert self.tracker.confidence(self.engine) is Reason.COMPLETE
        assert self.claims() == self.life.now()
        assert self.tracker.budget.used_bytes == 0


Truth.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
test_the_index_is_true_whatever_happens_to_messages = Truth.TestCase


def test_a_publisher_that_answers_again_is_soon_asked_for_its_earlier_messages() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=1000)
    truth.stores({1})
    truth.loses(count=1)
    truth.stores({2})
    truth.arrive(count=1, twice=False)
    for _ in range(TRIES):
        truth.is_not_answered()
        truth.waits(2.0)
    assert truth.tracker.confidence(truth.engine) is Reason.LATE
    assert truth.claims() == {2}
    for _ in range(2):  # when it has been quiet; half a minute after it has answered that
        truth.waits(CHECK_S)
        truth.heal()
        truth.what_is_trusted_is_true()
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert truth.claims() == {1, 2}


def test_an_engine_is_not_trusted_from_the_first_new_answer_to_a_replay_until_its_end() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=1000)
    truth.stores({1})
    truth.replay_begins()
    truth.replay_goes_on(count=2, dropped=False)
    truth.waits(1.0)
    truth.stores({2})
    truth.removes({1})
    truth.stores({3})
    truth.waits(CHECK_S)  # it has been quiet: the publisher is asked what is new
    truth.replay_begins()
    truth.replay_goes_on(count=1, dropped=False)  # what is known already
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    truth.replay_goes_on(count=1, dropped=False)
    assert truth.claims() == {1, 2}
    assert truth.tracker.confidence(truth.engine) is Reason.GAP
    truth.heal()
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert truth.claims() == {2, 3}


def test_an_engine_is_not_trusted_while_a_replay_has_a_hole() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=5)
    truth.replay_begins()
    truth.replay_goes_on(count=1, dropped=False)
    truth.waits(1.0)
    truth.stores({1})
    truth.removes({1})
    truth.stores({2})
    truth.stores({3})
    truth.waits(CHECK_S)
    truth.replay_begins()
    truth.replay_goes_on(count=3, dropped=True)
    assert truth.claims() == {1}  # the answer that removes it was dropped
    assert not truth.tracker.trusts(truth.engine)
    truth.heal()
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert truth.claims() == {2, 3}


def test_an_engine_whose_replay_breaks_off_is_not_trusted_until_its_next_message() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=1000)
    truth.stores({1})
    truth.removes({1})
    truth.loses(count=2)
    truth.replay_begins()
    truth.replay_goes_on(count=1, dropped=False)
    truth.replay_breaks()
    for _ in range(TRIES):
        truth.is_not_answered()
        truth.waits(5.0)
    assert truth.claims() == {1}
    assert truth.tracker.confidence(truth.engine) is Reason.CUT
    truth.removes({1})
    truth.arrive(count=1, twice=False)
    truth.heal()
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert not truth.claims()


def test_a_message_of_a_new_publisher_is_not_taken_for_one_that_the_old_one_lost() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=0)
    truth.replay_begins()
    truth.replay_goes_on(count=1, dropped=False)
    for blocks in ({1}, {2}, {3}):
        truth.stores(blocks)
    truth.loses(count=2)
    truth.arrive(count=1, twice=False)
    truth.is_not_answered()
    truth.restarts(noticed=False)
    for blocks in ({1}, {2}):
        truth.stores(blocks)
        truth.arrive(count=1, twice=False)
        truth.what_is_trusted_is_true()
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert truth.claims() == {1, 2}


def test_answers_to_a_replay_from_before_a_restart_change_nothing() -> None:
    truth = Truth()
    truth.begin(replays=True, kept=1000)
    truth.stores({1})
    truth.stores({2})
    truth.arrive(count=2, twice=False)
    truth.restarts(noticed=False)
    truth.stores({3})
    truth.arrive(count=1, twice=False)
    truth.removes({3})
    truth.replay_begins()
    truth.replay_goes_on(count=8, dropped=False)
    truth.what_is_trusted_is_true()
    assert truth.claims() == {3}
    truth.arrive(count=1, twice=False)
    assert truth.tracker.confidence(truth.engine) is Reason.COMPLETE
    assert not truth.claims()
