"""Polls for landings: how often, how long, and what a failure means. Nothing here sleeps."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import Identity
from kvrouter.engines.families.base import Handoff
from kvrouter.prefix.stores.base import (
    NOTHING_HELD,
    LandingOutcome,
    LandingResult,
    Origin,
    WantedBlocks,
)
from kvrouter.prefix.stores.polling import (
    BRIEF_S,
    LONGEST_PAUSE_S,
    POLLS_PER_S,
    SILENCE,
    SOUNDED,
    HttpPeer,
    PollingView,
    Question,
)
from kvrouter_store.errors import KVStoreError, StoreUnavailable

HASHES = bytes(32 * 4)
ORIGIN = Origin(b"", 16, None, None)


@dataclass
class Script:
    """A catalogue in which blocks appear at given times.

    Attributes:
        at_s: when each block appears.
        fails: raised by every question.
        takes_s: how long each answer takes.
        asked_s: when it was asked.
        held_s: how many blocks it was told to hold.
    """

    server: ClassVar[str] = "a script"
    silence: ClassVar[str] = "nobody reports"
    forms: ClassVar[str] = "none"
    health_path: ClassVar[str] = "/"
    keeps_engines: ClassVar[bool] = True

    clock: Clock
    at_s: list[float] = field(default_factory=list)
    fails: KVStoreError | None = None
    takes_s: float = 0.0
    asked_s: list[float] = field(default_factory=list)
    held_s: list[int] = field(default_factory=list)

    def named(self, identity: Identity) -> Identity:
        return replace(identity, manifest="its own")

    def possible(self, upto: int, origin: Origin | None) -> int:
        return min(upto, 4)

    async def held(self, peer: HttpPeer, question: Question) -> int:
        self.asked_s.append(self.clock.now)
        self.held_s.append(question.found)
        self.clock.pass_s(self.takes_s)
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return sum(at <= self.clock.now for at in self.at_s)


class Beside(Script):
    """Engines do without it."""

    keeps_engines: ClassVar[bool] = False


def view_of(script: Script) -> PollingView:
    async def sleep(seconds: float) -> None:
        script.clock.pass_s(seconds)
        await asyncio.sleep(0)

    return PollingView(HttpPeer("", "", ""), script, script.clock, sleep)


async def wait(
    view: PollingView, deadline_s: float = 2.0, upto: int = 4, reused: int | None = None
) -> LandingResult:
    return await view.wait(
        WantedBlocks("m", HASHES, upto, origin=ORIGIN, reused=reused), deadline_s
    )


async def test_pauses_between_polls_grow_and_stay_short(clock: Clock) -> None:
    begun_s = clock.now
    script = Script(clock, [begun_s] * 3)
    landing = await wait(view_of(script))
    assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, 3)
    pauses = [b - a for a, b in zip(script.asked_s, script.asked_s[1:], strict=False)]
    assert script.asked_s[0] == begun_s
    assert pauses[:3] == pytest.approx([0.005, 0.01, 0.02])
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)
    assert script.asked_s[-1] == pytest.approx(begun_s + 2.0)
    assert len(script.asked_s) < 20
    assert script.held_s == [0] + [3] * (len(script.asked_s) - 1)


async def test_a_landing_is_seen_at_the_next_poll(clock: Clock) -> None:
    begun_s = clock.now
    script = Script(clock, [begun_s, begun_s, begun_s, begun_s + 0.03])
    landing = await wait(view_of(script))
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, 4)
    assert clock.now - begun_s < 0.04


async def test_the_more_landings_are_awaited_the_longer_are_their_pauses(clock: Clock) -> None:
    begun_s = clock.now
    script = Script(clock)
    view = view_of(script)
    await asyncio.gather(*(wait(view, deadline_s=1.0) for _ in range(100)))
    assert 100 <= len(script.asked_s) <= 100 + POLLS_PER_S * (clock.now - begun_s)
    assert script.asked_s[:100] == [begun_s] * 100


async def test_pauses_are_no_shorter_than_answers_take(clock: Clock) -> None:
    begun_s = clock.now
    script = Script(clock, takes_s=0.4)
    await wait(view_of(script))
    assert [asked_s - begun_s for asked_s in script.asked_s] == pytest.approx([0, 0.8, 1.6, 2.0])


async def test_a_store_that_is_away_ends_the_wait_at_once(clock: Clock) -> None:
    begun_s = clock.now
    needed = view_of(Script(clock, fails=StoreUnavailable("away")))
    beside = view_of(Beside(clock, fails=StoreUnavailable("away")))
    lost, counted = await wait(needed), await wait(beside)
    assert (lost.outcome, lost.blocks) == (LandingOutcome.STORE_AWAY, 0)
    assert (counted.outcome, counted.blocks) == (LandingOutcome.STORE_AWAY, 4)  # as promised
    assert lost.lease is counted.lease is None
    assert clock.now == begun_s
    assert needed.counts == {"store_away": 1}


async def test_an_answer_that_came_too_late_does_not_end_the_wait_where_engines_need_the_store(
    clock: Clock,
) -> None:
    for kind, outcome in ((Script, LandingOutcome.LANDED), (Beside, LandingOutcome.STORE_AWAY)):
        script = kind(clock, [clock.now] * 4, fails=StoreUnavailable("no answer within 1 s"))
        view = view_of(script)
        view.peer.slow = True
        waiting = asyncio.create_task(wait(view))
        while len(script.asked_s) < 3 and not waiting.done():
            await asyncio.sleep(0)
        script.fails = None
        assert (await waiting).outcome is outcome


async def test_a_store_whose_answers_stay_late_is_awaited_until_the_deadline(clock: Clock) -> None:
    begun_s = clock.now
    view = view_of(Script(clock, fails=StoreUnavailable("no answer within 1 s")))
    view.peer.slow = True
    landing = await wait(view)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, 0)
    assert clock.now == pytest.approx(begun_s + 2.0)


async def test_what_an_engine_reused_is_awaited_for_a_moment_where_nobody_reports_it_again(
    clock: Clock,
) -> None:
    begun_s, script = clock.now, Beside(clock)
    landing = await wait(view_of(script), reused=4 * 16)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, 4)
    assert clock.now - begun_s == pytest.approx(BRIEF_S)
    script.at_s = [clock.now + 0.5] * 4
    landing = await wait(view_of(script), reused=2 * 16 + 15)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, 4)
    assert 2 in script.held_s


async def test_what_an_engine_reused_and_puts_now_is_awaited(clock: Clock) -> None:
    begun_s, script = clock.now, Beside(clock, [clock.now + 0.03] * 4)
    assert (await wait(view_of(script), reused=4 * 16)).outcome is LandingOutcome.LANDED
    assert 0.03 <= clock.now - begun_s < 0.05


async def test_a_store_that_engines_need_is_asked_for_what_they_reused(clock: Clock) -> None:
    landing = await wait(view_of(Script(clock)), reused=4 * 16)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, 0)


async def test_silence_is_no_missing_kv_unless_the_engine_says_what_it_reused(
    clock: Clock,
) -> None:
    script = Beside(clock)
    view = view_of(script)
    for reused, blocks in ((0, 0), (3 * 16, 3), (None, 4)):  # what it computed would be reported
        script.at_s = [clock.now] * (blocks % 4)
        landing = await wait(view, reused=reused)
        assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, blocks)


async def test_few_landings_are_awaited_in_full_while_none_comes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    script = Beside(clock)
    view = view_of(script)

    async def took_s() -> float:
        begun_s = clock.now
        await wait(view)
        return clock.now - begun_s

    waits = [await took_s() for _ in range(2 * SOUNDED + 1)]
    full = [*range(SILENCE), SILENCE + SOUNDED - 1]
    assert waits == pytest.approx([2.0 if n in full else BRIEF_S for n in range(len(waits))])
    assert caplog.messages == [" has no news of landings: nobody reports"]
    script.at_s = [clock.now] * 4
    await wait(view)
    script.at_s = []
    assert [await took_s() for _ in range(SILENCE)] == pytest.approx([2.0] * SILENCE)
    assert await took_s() == pytest.approx(BRIEF_S)
    assert len(caplog.messages) == 2


async def test_of_landings_that_begin_together_in_silence_one_in_many_is_awaited_in_full(
    clock: Clock,
) -> None:
    view = view_of(Beside(clock))
    for _ in range(SILENCE):
        await wait(view)
    begun_s, ends_s = clock.now, list[float]()

    async def note() -> None:
        await wait(view, deadline_s=20.0)
        ends_s.append(clock.now - begun_s)

    await asyncio.gather(*(note() for _ in range(SOUNDED)))
    assert sum(end_s >= 20.0 for end_s in ends_s) == 1


async def test_where_an_engine_says_what_it_reused_silence_shortens_no_wait(clock: Clock) -> None:
    begun_s, view = clock.now, view_of(Beside(clock))
    for _ in range(2 * SILENCE):
        await wait(view, reused=0)
    assert clock.now - begun_s == pytest.approx(2 * SILENCE * 2.0)


async def test_landings_of_a_store_that_engines_need_are_all_awaited_in_full(clock: Clock) -> None:
    begun_s, view = clock.now, view_of(Script(clock))
    for _ in range(2 * SILENCE):
        await wait(view)
    assert clock.now - begun_s == pytest.approx(2 * SILENCE * 2.0)


async def test_a_match_without_an_answer_is_counted(clock: Clock) -> None:
    view = view_of(Script(clock, fails=StoreUnavailable("away")))
    assert await view.match("m", HASHES) == NOTHING_HELD
    assert view.counts == {"match_failed": 1}


async def test_what_a_store_never_holds_is_not_missed(clock: Clock) -> None:
    script = Script(clock, [clock.now] * 4)
    landing = await wait(view_of(script), upto=6)  # two blocks more than whole chunks
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, 6)


async def test_only_engines_that_can_be_asked_for_get_a_name(clock: Clock) -> None:
    view = view_of(Script(clock))
    joined = Identity(("m",), block_tokens=16, family="store")
    assert (await view.joins(joined)).manifest == "its own"
    for other in (replace(joined, family="nixl"), replace(joined, block_tokens=None)):
        assert (await view.joins(other)).manifest is None


async def test_all_blocks_that_another_engine_can_load_are_promised(clock: Clock) -> None:
    view, joined = view_of(Script(clock)), Identity(("m",), block_tokens=16, family="store")
    adopted = await view.joins(joined)
    for tokens, blocks in ((None, 0), (0, 0), (16, 0), (17, 1), (32, 1), (33, 2)):
        promised = view.promised(Handoff(prompt_tokens=tokens), adopted)
        assert promised == ("its own", blocks)
    assert view.promised(Handoff(prompt_tokens=33), joined) == (None, 2)
    assert view.promised(Handoff(prompt_tokens=33), None) == (None, 0)
