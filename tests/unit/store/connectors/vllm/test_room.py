"""Who has room in host memory: whatever happens, nobody waits for ever and nothing stays pinned."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrouter_store.connectors.vllm.room import LEAST_WAIT_S, Chunk, Found, Room

PROMPTS = [[f"{prompt}/{n}".encode() for n in range(6)] for prompt in range(5)]
ABOVE = 4096  # steps that no walk needs


@dataclass
class Slot:
    ready: bool = False
    pins: int = 0


@dataclass
class Memory:
    """Host memory of so many chunks, and what is on its way to it."""

    chunks: int
    slots: dict[bytes, Slot] = field(default_factory=dict)
    coming: list[bytes] = field(default_factory=list)
    computed: int = 0  # chunks that the engine writes
    shorted: int = 0

    @property
    def free(self) -> int:
        busy = sum(not each.ready or each.pins > 0 for each in self.slots.values())
        return self.chunks - self.computed - busy

    def state(self, key: bytes) -> Chunk:
        slot = self.slots.get(key)
        if slot is None:
            return Chunk.ABSENT
        if not slot.ready:
            return Chunk.COMING
        return Chunk.HELD if slot.pins else Chunk.IDLE

    def states(self, keys: Iterable[bytes]) -> list[Chunk]:
        return [self.state(key) for key in keys]

    def pin(self, keys: Collection[bytes], context: Any) -> None:
        for key in keys:
            assert self.slots[key].ready
            self.slots[key].pins += 1

    def unpin(self, keys: Collection[bytes], context: Any) -> None:
        for key in keys:
            assert self.slots[key].pins > 0
            self.slots[key].pins -= 1

    def bring(self, keys: Collection[bytes], context: Any) -> bool:
        if len(keys) > self.free:
            return False
        self._evict(len(keys))
        for key in keys:
            assert key not in self.slots
            self.slots[key] = Slot()
            self.coming.append(key)
        return True

    def compute(self, chunks: int) -> None:
        """The engine writes so many, if there is room."""
        if chunks <= self.free:
            self._evict(chunks)
            self.computed += chunks

    def short(self, chunks: int) -> None:
        self.shorted += chunks

    def _evict(self, chunks: int) -> None:
        idle = [key for key in self.slots if self.state(key) is Chunk.IDLE]
        while len(self.slots) + self.computed + chunks > self.chunks:
            del self.slots[idle.pop(0)]


@dataclass
class Request:
    """A request of an engine that asks for its prompt's chunks in each step."""

    name: str
    keys: list[bytes]
    landed: int
    loaded: int | None = None

    @property
    def context(self) -> Any:
        return SimpleNamespace(req_id=self.name)


class Engine:
    """Vllm's scheduler, as far as it looks chunks up: a prefix ends at its first miss."""

    def __init__(self, chunks: int) -> None:
        self.memory = Memory(chunks)
        self.now = 0.0
        self.room = Room(self.memory, lambda: self.now)
        self.waiting: list[Request] = []
        self.lost: set[bytes] = set()
        self.compute_s = 1e9
        self.number = 0

    def ask(self, keys: list[bytes], landed: int | None = None) -> Request:
        """A new request; of its chunks so many have landed."""
        landed = len(keys) if landed is None else landed
        self.waiting.append(Request(f"request-{self.number}", keys, landed))
        self.number += 1
        return self.waiting[-1]

    def end(self, request: Request) -> None:
        self.waiting.remove(request)
        self.room.release(request.name)

    def step(self, blocks: int = 99) -> None:
        """One step, in which the engine has blocks of its own for so many requests."""
        for request in [*self.waiting]:
            if self.room.waits(request.name):
                continue
            self.room.begin(request.name, request.context, self.compute_s)
            hits, pending = self._look_up(request)
            if pending:
                arriving = request.landed < len(request.keys)
                self.room.deferred(request.name, arriving=arriving)
                continue
            self.room.decided(request.name, loads=hits > 0)
            if blocks:
                blocks -= 1
                request.loaded = hits
                self.end(request)
        self.room.grant()

    def _look_up(self, request: Request) -> tuple[int, bool]:
        hits, pending = 0, False
        for number, key in enumerate(request.keys):
            state = self.memory.state(key)
            found = Found.THERE
            if state is Chunk.ABSENT and key in self.lost:
                found = Found.MISS
            elif state is Chunk.ABSENT and number >= request.landed:
                found = Found.UNKNOWN
            may_wait = self.room.found(request.name, key, found)
            there = state in {Chunk.IDLE, Chunk.HELD}
            if found is Found.MISS or not (there or may_wait):
                break
            pending |= not there
            hits += 1
        return hits, pending

    def arrive(self, chunks: int, *, whole: bool = True) -> None:
        """So many chunks come that were on their way, or are found to be lost."""
        came, self.memory.coming = self.memory.coming[:chunks], self.memory.coming[chunks:]
        for key in came:
            if whole:
                self.memory.slots[key].ready = True
            else:
                del self.memory.slots[key]
                self.lost.add(key)
        self.room.came(came)

    def finish(self) -> int:
        """Steps until nobody waits, while everything comes."""
        steps = 0
        while self.waiting and steps < ABOVE:
            self.memory.computed = 0
            for request in self.waiting:
                request.landed = len(request.keys)
            self.arrive(ABOVE)
            self.step()
            steps += 1
        self.memory.computed = 0
        self.arrive(ABOVE)
        return steps


def whole(request: Request) -> bool:
    return request.loaded == len(request.keys)


def test_hits_that_need_many_times_the_memory_are_all_loaded_in_turn() -> None:
    engine = Engine(chunks=14)
    asked = [engine.ask(keys) for keys in PROMPTS * 6]
    assert engine.finish() < ABOVE
    assert all(map(whole, asked))
    assert engine.memory.shorted == engine.room.pinned() == 0


def test_requests_that_wait_never_hold_a_part_each() -> None:
    engine = Engine(chunks=11)  # two prompts need 12
    first, second = engine.ask(PROMPTS[0]), engine.ask(PROMPTS[1])
    engine.step()
    assert engine.memory.coming == PROMPTS[0]
    engine.arrive(99)
    engine.step()
    assert whole(first)
    assert engine.finish() < ABOVE
    assert whole(second)


def test_what_was_brought_is_pinned_until_its_request_has_blocks() -> None:
    engine = Engine(chunks=6)
    request = engine.ask(PROMPTS[0])
    engine.step()
    engine.arrive(99)
    engine.memory.compute(1)
    assert engine.memory.computed == 0  # no room: all is pinned
    engine.step(blocks=0)
    engine.step()
    assert whole(request)
    engine.memory.compute(6)
    assert engine.memory.computed == 6


def test_a_prompt_that_can_never_fit_loads_what_there_is_room_for_and_waits_for_nobody() -> None:
    engine = Engine(chunks=4)
    engine.memory.compute(2)
    request = engine.ask(PROMPTS[0])
    engine.step()
    engine.arrive(99)
    engine.step()
    assert request.loaded == 2
    assert engine.memory.shorted == 4
    engine.memory.compute(2)
    another = engine.ask(PROMPTS[1])
    engine.step()
    engine.step()
    assert another.loaded == 0


@pytest.mark.parametrize("compute_s", [LEAST_WAIT_S / 10, 5.0])
def test_a_slow_store_is_awaited_as_long_as_computing_takes(compute_s: float) -> None:
    engine = Engine(chunks=20)
    engine.compute_s = compute_s
    request = engine.ask(PROMPTS[0])
    engine.step()
    engine.arrive(2)
    while request.loaded is None:
        engine.now += 0.05
        engine.step()
    assert request.loaded == 2
    patience_s = max(LEAST_WAIT_S, compute_s)
    assert patience_s < engine.now < patience_s + 0.11


def test_who_waits_for_room_has_the_patience_of_all_that_are_ahead() -> None:
    engine = Engine(chunks=6)
    engine.compute_s = 1.0
    asked = [engine.ask(keys) for keys in PROMPTS[:3]]
    ended = []
    while engine.waiting:
        engine.step()
        engine.now += 0.1
        ended.append(sum(each.loaded is not None for each in asked))
    assert [ended.count(number) for number in range(3)] == pytest.approx([11, 10, 10], abs=1)
    assert engine.memory.shorted == 12


def test_only_steps_in_which_a_request_was_asked_for_count() -> None:
    engine = Engine(chunks=6)
    engine.compute_s = 1.0
    request = engine.ask(PROMPTS[0])
    engine.step()
    waiting, engine.waiting = engine.waiting, []
    for _ in range(5):  # the engine has no blocks: nobody is asked for
        engine.now += 10
        engine.step()
    engine.waiting = waiting
    engine.step()
    engine.arrive(99)
    engine.step()
    assert whole(request)


def test_what_has_yet_to_land_has_its_room_reserved() -> None:
    engine = Engine(chunks=11)
    early, late = engine.ask(PROMPTS[0], landed=1), engine.ask(PROMPTS[1])
    engine.step()
    engine.arrive(99)
    engine.step()
    assert not engine.memory.coming  # five more chunks of the first will come
    early.landed = 6
    engine.step()
    assert engine.finish() < ABOVE
    assert whole(early)
    assert whole(late)


class Walk(RuleBasedStateMachine):
    """Requests that come, end and wait, beside a store that is slow and loses chunks."""

    @initialize(chunks=st.integers(1, 30), patient=st.booleans())
    def begin(self, chunks: int, patient: bool) -> None:
        self.engine = Engine(chunks)
        self.engine.compute_s = 1e9 if patient else 0.01

    @rule(prompt=st.sampled_from(PROMPTS), size=st.integers(1, 6), landed=st.integers(0, 6))
    def ask(self, prompt: list[bytes], size: int, landed: int) -> None:
        self.engine.ask(prompt[:size], min(size, landed))

    @rule(blocks=st.integers(0, 3))
    def step(self, blocks: int) -> None:
        self.engine.step(blocks)

    @rule(chunks=st.integers(1, 8), whole=st.booleans())
    def arrive(self, chunks: int, whole: bool) -> None:
        self.engine.arrive(chunks, whole=whole)

    @rule(chunks=st.integers(1, 8))
    def compute(self, chunks: int) -> None:
        self.engine.memory.compute(chunks)

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        if self.engine.waiting:
            self.engine.end(data.draw(st.sampled_from(self.engine.waiting)))

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if self.engine.waiting:
            request = data.draw(st.sampled_from(self.engine.waiting))
            request.landed = min(len(request.keys), request.landed + 1)

    @rule()
    def reset(self) -> None:
        """Vllm drains all transfers before."""
        self.engine.arrive(99)
        self.engine.memory.slots.clear()
        self.engine.memory.computed = 0
        self.engine.room.forget()

    @invariant()
    def pins_are_those_of_the_memory(self) -> None:
        memory, room = self.engine.memory, self.engine.room
        assert memory.free >= 0
        assert sum(slot.pins for slot in memory.slots.values()) == room.pinned()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.finish() < ABOVE
            assert self.engine.room.pinned() == 0
            assert not self.engine.room.waiting
            assert self.engine.memory.free == self.engine.memory.chunks


TestWalk = Walk.TestCase
TestWalk.settings = settings(stateful_step_count=40)
