"""A tier that does not answer costs one deadline; then it is away until a start works again."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from kvrouter_store.tiers.base import Item, Memory, TierAway, TierStatus
from kvrouter_store.tiers.guard import (
    FALSIFIED_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_CALLS,
    MOST_FALSIFIED,
    REFUSED_PAUSE_S,
    Guard,
)
from kvrouter_store.tiers.staging import Staging

ITEMS = [Item("a", 0, 10), Item("b", 64, 10)]


class ScriptedTier:
    """A tier that does what the test says."""

    name = "scripted://tier"

    def __init__(self) -> None:
        self.starts = self.stops = 0
        self.broken: Exception | None = None
        self.hanging = asyncio.Event()
        self.hangs = False

    async def start(self, memory: Memory) -> None:
        self.starts += 1
        await self._act()

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        await self._act()
        return [True, False]

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        await self._act()
        return [TierStatus.OK, TierStatus.MISSING]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        await self._act()
        return [TierStatus.OK, TierStatus.FAILED]

    async def drop(self, keys: Sequence[str]) -> None:
        await self._act()

    async def stop(self) -> None:
        self.stops += 1

    async def _act(self) -> None:
        if self.hangs:
            self.hanging.set()
            await asyncio.Event().wait()
        if self.broken:
            raise self.broken


class Time:
    """A clock that moves when somebody sleeps, each time when the test lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.starts: list[float] = []
        self.sleeping = asyncio.Semaphore(0)
        self.wake = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.sleeping.release()
        await self.wake.acquire()
        self.now += seconds


@pytest.fixture
def tier() -> ScriptedTier:
    return ScriptedTier()


@pytest.fixture
def time() -> Time:
    return Time()


class Kept:
    """A guard whose `keep` runs."""

    def __init__(self, tier: ScriptedTier, time: Time, timeout_s: float = 5.0) -> None:
        staging = Staging(1 << 20)
        memory = staging.memory
        self.guard = Guard(
            tier,
            memory,
            timeout_s,
            changed=lambda up: time.starts.append(time.now) if up else None,
            clock=lambda: time.now,
            sleep=time.sleep,
        )

    async def __aenter__(self) -> Guard:
        self._task = asyncio.create_task(self.guard.keep())
        await until(lambda: self.guard.up)
        return self.guard

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition is true."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not become true")


async def test_calls_are_passed_on_and_counted(tier: ScriptedTier, time: Time) -> None:
    async with Kept(tier, time) as guard:
        assert await guard.holds(["a", "b"]) == [True, False]
        assert await guard.load(ITEMS) == [TierStatus.OK, TierStatus.MISSING]
        assert await guard.store(ITEMS) == [TierStatus.OK, TierStatus.FAILED]
        assert guard.values == {
            ("holds", "ok"): 1,
            ("holds", "missing"): 1,
            ("load", "ok"): 1,
            ("load", "missing"): 1,
            ("store", "ok"): 1,
            ("store", "failed"): 1,
        }
        assert guard.moved == {"load": 10, "store": 10}
    assert tier.stops == 1


async def test_a_failure_opens_the_circuit_and_a_start_closes_it(
    tier: ScriptedTier, time: Time
) -> None:
    async with Kept(tier, time) as guard:
        tier.broken = TierAway("connection refused")
        assert await guard.load(ITEMS) == [TierStatus.FAILED] * 2
        assert not guard.up
        await time.sleeping.acquire()
        assert (tier.starts, tier.stops) == (1, 1)
        calls = guard.values["load", "failed"]
        assert await guard.holds(["a", "b"]) == [False, False]
        assert guard.values["holds", "skipped"] == 2
        assert guard.values["load", "failed"] == calls
        tier.broken = None
        time.wake.release()
        await until(lambda: guard.up)
        assert await guard.holds(["a", "b"]) == [True, False]
        assert time.starts == [0.0, FIRST_PAUSE_S]


async def test_pauses_grow_while_starts_fail(tier: ScriptedTier, time: Time) -> None:
    async with Kept(tier, time) as guard:
        tier.broken = OSError("whatever a foreign client raises")
        await guard.store(ITEMS)
        for _ in range(12):
            await time.sleeping.acquire()
            time.wake.release()
        await time.sleeping.acquire()
        assert time.pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
        assert max(time.pauses) == LONGEST_PAUSE_S


async def test_a_tier_that_breaks_soon_after_each_start_is_started_less_and_less(
    tier: ScriptedTier, time: Time
) -> None:
    async with Kept(tier, time) as guard:
        for at in range(3):
            tier.broken = TierAway("reset")
            await guard.load(ITEMS)
            await time.sleeping.acquire()
            tier.broken = None
            time.wake.release()
            await until(lambda: guard.up)
            assert time.pauses[at] == FIRST_PAUSE_S * 2**at
        time.now += LONGEST_PAUSE_S + 1
        tier.broken = TierAway("reset")
        await guard.load(ITEMS)
        await time.sleeping.acquire()
        assert time.pauses[-1] == FIRST_PAUSE_S


async def test_a_call_that_hangs_ends_at_its_deadline(tier: ScriptedTier, time: Time) -> None:
    async with Kept(tier, time, timeout_s=0.02) as guard:
        tier.hangs = True
        assert await guard.holds(["a", "b"]) == [False, False]
        assert not guard.up
        assert guard.values["holds", "failed"] == 2


async def test_more_calls_than_may_be_inside_are_refused(tier: ScriptedTier, time: Time) -> None:
    async with Kept(tier, time) as guard:
        tier.hangs = True
        inside = [asyncio.create_task(guard.load(ITEMS)) for _ in range(MOST_CALLS)]
        await tier.hanging.wait()
        assert await guard.load(ITEMS) == [TierStatus.FAILED] * 2
        assert guard.values["load", "skipped"] == 2
        assert guard.up
        for each in inside:
            each.cancel()
        await asyncio.wait(inside)


async def test_a_tier_that_is_kept_no_more_is_told_as_away(tier: ScriptedTier) -> None:
    told: list[bool] = []
    guard = Guard(tier, Staging(1 << 20).memory, 5.0, changed=told.append)
    keeping = asyncio.create_task(guard.keep())
    await until(lambda: guard.up)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert told == [True, False]


async def test_falsified_values_are_dropped_and_counted(tier: ScriptedTier, time: Time) -> None:
    async with Kept(tier, time) as guard:
        await guard.drop_falsified(["a"])
        assert guard.values["load", "falsified"] == 1


async def test_a_falsified_value_counts_as_missing_until_it_is_put_again_or_for_a_minute(
    tier: ScriptedTier, time: Time
) -> None:
    async with Kept(tier, time) as guard:
        await guard.drop_falsified(["a"])
        assert await guard.holds(["a", "b"]) == [False, False]
        await guard.store(ITEMS)
        assert await guard.holds(["a", "b"]) == [True, False]
        await guard.drop_falsified(["a"])
        time.now += FALSIFIED_S
        assert await guard.holds(["a", "b"]) == [True, False]
        await guard.drop_falsified([f"{number}" for number in range(2 * MOST_FALSIFIED)])
        assert len(guard._falsified) == MOST_FALSIFIED


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [one.message for one in caplog.records if one.levelno == logging.WARNING]


async def test_a_tier_that_never_answered_says_each_reason_once_until_it_is_there(
    tier: ScriptedTier, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tier.broken = TierAway("refused")
    kept = Kept(tier, time)
    keeping = asyncio.create_task(kept.guard.keep())
    for why in ("refused", "refused", "no route", "no route"):
        tier.broken = TierAway(why)
        await time.sleeping.acquire()
        time.wake.release()
    await time.sleeping.acquire()
    assert [line.split("; ")[0] for line in lines(caplog)] == [
        "scripted://tier is away: refused",
        "scripted://tier is away: no route",
    ]
    tier.broken = None
    time.wake.release()
    await until(lambda: kept.guard.up)
    assert caplog.records[-1].message == "scripted://tier is there"
    keeping.cancel()
    await asyncio.wait({keeping})


async def test_the_same_reason_is_said_again_after_the_tier_was_there(
    tier: ScriptedTier, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    async with Kept(tier, time) as guard:
        for times in (1, 2):
            tier.broken = TierAway("reset")
            await guard.load(ITEMS)
            await time.sleeping.acquire()
            assert len(lines(caplog)) == times
            tier.broken = None
            time.wake.release()
            await until(lambda: guard.up)


async def test_values_that_a_tier_does_not_take_are_said_with_their_number_once_a_minute(
    tier: ScriptedTier, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    async with Kept(tier, time) as guard:
        for _ in range(4):
            await guard.store(ITEMS)
        assert guard.up
        assert len(lines(caplog)) == 1
        time.now += REFUSED_PAUSE_S
        await guard.store(ITEMS)
        first, second = lines(caplog)
        assert "did not store 1 values" in first
        assert "did not store 4 values" in second
        assert "maxmemory-policy" in second
