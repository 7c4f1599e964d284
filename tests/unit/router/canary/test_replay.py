"""When a sample is computed again, and when it is given up."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest_asyncio
from tests.unit.router.conftest import Clock, joined

from kvrouter.canary.replay import MAX_SAMPLES, PATIENCE_S, CanaryReplays, Sample
from kvrouter.canary.settings import CanarySettings
from kvrouter.canary.verdict import CanaryOutcome
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.openai.request import parse

BODY = b'{"model": "m", "prompt": "Hello", "max_tokens": 3, "temperature": 0}'
ANSWER = b'{"choices": [{"token_ids": [1, 2, 3]}]}'


class Replaying:
    """Replays to one engine, which gives the right answer; time stands still between pauses.

    Attributes:
        asked: replays that the engine got.
        waiting: requests that wait in the router.
        looks: one entry for each pause.
    """

    def __init__(self) -> None:
        self.clock, self.pool = Clock(), EnginePool()
        self.engine = joined(self.pool, "d:1", Role.DECODE)
        self.asked = self.waiting = 0
        self.pause_s = 0.0
        self.looks: asyncio.Queue[float] = asyncio.Queue()
        self.deadlines = SimpleNamespace(idle_s=1.0)
        self.worker_keys = SimpleNamespace(judged=lambda *_: False)

    def replays(self, below_requests: int = 1) -> CanaryReplays:
        family: Any = SimpleNamespace(isolated_body=lambda request, **_: request.body)
        families: Any = SimpleNamespace(of=lambda _: family)
        client: Any = self
        return CanaryReplays(
            self.pool,
            families,
            client,
            waiting=lambda: self.waiting,
            settings=CanarySettings(canary_below_requests=below_requests, canary_near_tie=0.5),
            clock=self.clock,
            pause=self._pause,
        )

    def sample(self) -> Sample:
        request = parse(BODY, "completion", 1)
        return Sample("id", request, "m", self.engine, None, b"", None, (1, 2, 3), self.clock())

    async def send(self, engine: Engine, *_: object, **__: object) -> Any:
        assert engine is self.engine
        self.asked += 1
        return SimpleNamespace(status=200, coding=None, read=self._read)

    async def _read(self, *_: object) -> bytes:
        return ANSWER

    async def _pause(self, seconds: float) -> None:
        self.looks.put_nowait(seconds)
        self.clock.pass_s(self.pause_s)
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Replaying]:
    yield Replaying()


async def ended(replays: CanaryReplays, count: int) -> dict[Any, int]:
    """The outcomes, once there are so many."""
    async with asyncio.timeout(10):
        while sum(replays.outcomes.values()) < count:
            await asyncio.sleep(0)
    await replays.close()
    return {outcome: count for outcome, count in replays.outcomes.items() if count}


async def test_every_outcome_is_counted_from_zero(here: Replaying) -> None:
    outcomes = here.replays().outcomes
    assert dict(outcomes) == dict.fromkeys(CanaryOutcome, 0)


async def test_a_replay_waits_until_its_engine_is_idle(here: Replaying) -> None:
    replays = here.replays(below_requests=2)
    tickets = [here.pool.reserve(here.engine, 1) for _ in range(2)]
    replays.offer(here.sample())
    for _ in range(3):
        await here.looks.get()
    assert here.asked == 0
    tickets.pop().release()
    assert await ended(replays, 1) == {"equal": 1}
    assert here.asked == 1


async def test_a_replay_waits_while_clients_wait_and_is_given_up_in_the_end(
    here: Replaying,
) -> None:
    here.waiting, here.pause_s = 1, PATIENCE_S / 4
    replays = here.replays()
    replays.offer(here.sample())
    assert await ended(replays, 1) == {"skipped": 1}
    assert here.looks.qsize() == 5
    assert here.asked == 0


async def test_samples_of_an_engine_that_is_gone_are_skipped(here: Replaying) -> None:
    replays = here.replays()
    ticket = here.pool.reserve(here.engine, 1)
    replays.offer(here.sample())
    await here.looks.get()
    here.pool.leave(here.engine)
    assert await ended(replays, 1) == {"skipped": 1}
    ticket.release()


async def test_more_samples_than_may_wait_are_skipped(here: Replaying) -> None:
    here.waiting = 1
    replays = here.replays()
    replays.offer(here.sample())
    await here.looks.get()  # it no longer waits for its turn
    for _ in range(MAX_SAMPLES + 1):
        replays.offer(here.sample())
    assert await ended(replays, 1) == {"skipped": 1}
