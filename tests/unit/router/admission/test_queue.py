from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.router.conftest import Clock

from kvrouter.admission.queue import Admission, Turn, Waiting, Work

WORK = Work(100, 10)


def woken() -> None:
    """Nobody listens."""


def full(queue_size: int, clock: Clock) -> Admission:
    """One request is under way, and no more may be."""
    door = Admission(1, queue_size, clock)
    assert door.enter()
    return door


def joined(door: Admission, tenant: str, priority: int = 0, work: Work = WORK) -> Waiting:
    waiting = door.join(tenant, priority, work, woken)
    assert waiting is not None
    return waiting


def test_requests_beyond_the_limit_do_not_enter(clock: Clock) -> None:
    door = Admission(2, 0, clock)
    assert [door.enter() for _ in range(3)] == [True, True, False]
    assert door.join("a", 0, WORK, woken) is None
    door.leave()
    assert door.enter()


def test_the_lowest_priority_goes_first_and_the_oldest_of_equals(clock: Clock) -> None:
    door = full(9, clock)
    waits = [joined(door, "a", priority) for priority in (0, 5, -1, 0)]
    order = []
    for _ in waits:
        door.leave()
        order += [k for k, w in enumerate(waits) if w.turn is Turn.ADMITTED and k not in order]
    assert order == [2, 0, 3, 1]


def test_tenants_take_turns_if_their_requests_are_alike(clock: Clock) -> None:
    door = full(20, clock)
    waits = [joined(door, "a") for _ in range(6)] + [joined(door, "b") for _ in range(3)]
    assert turns(door, waits, 6) == ["a", "b"] * 3


def test_single_requests_that_keep_coming_do_not_starve_another_tenant(clock: Clock) -> None:
    door = full(20, clock)
    patient = [joined(door, "patient") for _ in range(8)]
    eager = joined(door, "eager")
    for _ in range(8):
        door.leave()
        if eager.turn is Turn.ADMITTED:
            eager = joined(door, "eager")
    assert sum(w.turn is Turn.ADMITTED for w in patient) == 4


def turns(door: Admission, waits: list[Waiting], count: int) -> list[str]:
    """The tenants of the next `count` turns, where one request is under way at a time."""
    order: list[Waiting] = []
    for _ in range(count):
        door.leave()
        order += [w for w in waits if w.turn is Turn.ADMITTED and w not in order]
    return [w.tenant for w in order]


def test_who_fills_the_queue_keeps_no_other_tenant_out(clock: Clock) -> None:
    door = full(4, clock)
    flood = [joined(door, "flood") for _ in range(4)]
    newcomer = joined(door, "other")
    assert [w.turn for w in flood] == [Turn.WAITING] * 3 + [Turn.PUSHED_OUT]
    assert newcomer.turn is Turn.WAITING
    joined(door, "other")
    assert door.join("other", 0, WORK, woken) is None  # two each: there is nothing to make even


def test_a_more_urgent_request_pushes_out_a_later_one_of_its_own_tenant(clock: Clock) -> None:
    door = full(2, clock)
    waits = [joined(door, "a", 1), joined(door, "a", 2)]
    assert door.join("a", 2, WORK, woken) is None
    joined(door, "a", 1)
    assert [w.turn for w in waits] == [Turn.WAITING, Turn.PUSHED_OUT]


def test_the_refused_are_told_to_come_back_after_the_time_that_others_wait(clock: Clock) -> None:
    door = full(1, clock)
    assert door.retry_after_s == 1
    for _ in range(60):
        joined(door, "a")
        clock.pass_s(7)
        door.leave()
    assert door.retry_after_s == 7


def test_a_request_that_counts_for_several_lets_nobody_in_before_enough_have_ended(
    clock: Clock,
) -> None:
    door = Admission(2, 9, clock)
    assert door.enter()
    door.widen(3)
    assert not door.enter()
    waits = [joined(door, "b") for _ in range(3)]
    door.leave(2)
    assert [w.turn for w in waits] == [Turn.WAITING] * 3
    door.leave(2)
    assert [w.turn for w in waits] == [Turn.ADMITTED, Turn.ADMITTED, Turn.WAITING]
    door.leave()
    door.leave()
    door.leave()
    assert door.requests == 0


TENANTS = st.sampled_from(["a", "b", "c"])


class Door(RuleBasedStateMachine):
    """Any order of coming, waiting, going and giving up."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.door = Admission(3, 5, self.clock)
        self.running = 0
        self.waits: list[Waiting] = []

    @rule(tenant=TENANTS, priority=st.integers(-2, 2))
    def come(self, tenant: str, priority: int) -> None:
        if self.door.enter():
            self.running += 1
            return
        assert self.running == 3
        waiting = self.door.join(tenant, priority, WORK, self.wake)
        if waiting is None:
            assert len(self.waits) == 5
        else:
            self.waits.append(waiting)
            self.waits = [w for w in self.waits if w.turn is Turn.WAITING]

    @precondition(lambda self: self.running)
    @rule()
    def go(self) -> None:
        before = list(self.waits)
        self.door.leave()
        turned = [w for w in before if w.turn is Turn.ADMITTED]
        self.waits = [w for w in before if w.turn is Turn.WAITING]
        assert len(turned) == min(1, len(before))
        self.running += len(turned) - 1
        for one in turned:
            own = [(w.priority, w.number) for w in before if w.tenant == one.tenant]
            assert (one.priority, one.number) == min(own)

    @precondition(lambda self: self.waits)
    @rule(place=st.integers(0, 4))
    def give_up(self, place: int) -> None:
        waiting = self.waits.pop(place % len(self.waits))
        self.door.withdraw(waiting)
        self.door.withdraw(waiting)
        assert waiting.turn is Turn.WITHDRAWN

    def wake(self) -> None:
        """Called only for one that no longer waits."""

    @invariant()
    def it_counts_right(self) -> None:
        assert self.door.requests == self.running <= 3
        assert self.door.waiting == len(self.waits) <= 5
        assert not self.waits or self.running == 3


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
