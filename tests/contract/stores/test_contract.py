"""Every store of another project, fake and real: what the router may count on."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tests.contract.stores.backends import (
    BLOCK_TOKENS,
    BLOCKS,
    IDENTITY,
    KINDS,
    Backend,
    Prompt,
    started,
)
from tests.fakes.patience import until

from kvrouter.prefix.stores import foreign_store
from kvrouter.prefix.stores.base import LandingOutcome, LandingResult, WantedBlocks
from kvrouter.prefix.stores.polling import ANSWER_S, PollingView

LONG_S = 30.0
pytestmark = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Asking:
    """A view of a store that `backend` stands behind. `paused`: is set when it waits to poll."""

    backend: Backend
    view: PollingView
    paused: asyncio.Event

    async def manifest(self) -> str:
        manifest = (await self.view.joins(IDENTITY)).manifest
        assert manifest is not None
        return manifest

    async def match(self, prompt: Prompt) -> int:
        found = await self.view.match(await self.manifest(), prompt.hashes, prompt.origin)
        assert found.nodes is None
        return found.blocks

    async def wait(
        self, prompt: Prompt, deadline_s: float = LONG_S, reused: int | None = None
    ) -> LandingResult:
        blocks = await self.manifest(), prompt.hashes, BLOCKS
        wanted = WantedBlocks(*blocks, origin=prompt.origin, reused=reused)
        return await self.view.wait(wanted, deadline_s)

    async def until_connected(self) -> None:
        await until(lambda: self.view.peer.connected, LONG_S)


@pytest_asyncio.fixture
async def asking(kind: str, tmp_path: Path) -> AsyncIterator[Asking]:
    backend = await started(kind, tmp_path)
    view = foreign_store(backend.url)
    paused, sleep = asyncio.Event(), view.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            paused.set()
        await sleep(seconds)

    view.sleep = pause
    await view.start(LONG_S)
    assert view.peer.connected
    yield Asking(backend, view, paused)
    await view.close()
    await backend.close()


async def test_a_match_ends_before_the_first_block_that_is_not_there(asking: Asking) -> None:
    prompt = Prompt()
    assert await asking.match(prompt) == 0
    await asking.backend.hold(prompt, [0, 1, 4, 5])
    assert await asking.match(prompt) == 2
    await asking.backend.hold(prompt, [2, 3])
    assert await asking.match(prompt) == 6
    await asking.backend.hold(prompt, range(BLOCKS))
    assert await asking.match(prompt) == BLOCKS


async def test_a_block_is_there_when_all_ranks_have_put_it(asking: Asking) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(BLOCKS), ranks=[0])
    assert await asking.match(prompt) == 0
    await asking.backend.hold(prompt, range(4), ranks=[1])
    assert await asking.match(prompt) == 4


async def test_another_salt_has_nothing(asking: Asking) -> None:
    await asking.backend.hold(Prompt("alice"), range(BLOCKS))
    assert await asking.match(Prompt("bob")) == await asking.match(Prompt()) == 0
    assert await asking.match(Prompt("alice")) == BLOCKS


async def test_a_landing_is_seen_when_its_last_block_comes(asking: Asking) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(4))
    waiting = asyncio.create_task(asking.wait(prompt))
    await asking.paused.wait()
    assert not waiting.done()
    await asking.backend.hold(prompt, range(4, BLOCKS))
    landing = await waiting
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, BLOCKS)
    assert landing.lease is not None
    landing.lease.release()


async def test_puts_that_have_only_begun_have_not_landed(asking: Asking) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(4))
    await asking.backend.begin(prompt, range(4, BLOCKS))
    assert await asking.match(prompt) == 4
    waiting = asyncio.create_task(asking.wait(prompt))
    await asking.paused.wait()
    await asking.backend.hold(prompt, range(4, BLOCKS))
    landing = await waiting
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, BLOCKS)


async def test_a_landing_that_does_not_come_says_how_far_it_came(asking: Asking) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(4))
    landing = await asking.wait(prompt, 0.1, 1)  # reused tokens: the engine computed the rest
    assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, 4)
    assert landing.lease is None


async def test_a_killed_store_holds_up_nobody_and_is_used_again_when_it_is_back(
    asking: Asking,
) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(BLOCKS))
    await asking.backend.kill()
    assert await asking.match(prompt) == 0
    assert (await asking.wait(prompt)).outcome is LandingOutcome.STORE_AWAY
    assert asking.view.counts == {"match_failed": 1, "store_away": 1}
    await asking.backend.mend()
    await asking.until_connected()
    await asking.backend.hold(prompt, range(4))
    assert await asking.match(prompt) == 4


async def test_a_coordinator_that_forgot_what_engines_hold_costs_them_nothing(
    asking: Asking,
) -> None:
    """Nothing is posted again: engines put only what they computed, and servers report only puts.

    What is not in Mooncake's master is nowhere.
    """
    prompt, needed = Prompt(), asking.view.catalogue.keeps_engines
    await asking.backend.hold(prompt, range(BLOCKS))
    await asking.backend.kill()
    await asking.view.match("m", prompt.hashes, prompt.origin)
    await asking.backend.mend()
    await asking.until_connected()
    silent = await asking.wait(prompt, 0.1)
    assert (silent.outcome, silent.blocks) == (LandingOutcome.TIMEOUT, 0 if needed else BLOCKS)
    whole = await asking.wait(prompt, 0.1, BLOCKS * BLOCK_TOKENS)
    assert whole.blocks == (0 if needed else BLOCKS)
    assert whole.outcome is (LandingOutcome.TIMEOUT if needed else LandingOutcome.LANDED)
    await asking.backend.hold(prompt, range(4, BLOCKS))  # a longer prompt, whose rest was computed
    rest = await asking.wait(prompt, 0.1, 4 * BLOCK_TOKENS)
    assert rest.outcome is (LandingOutcome.TIMEOUT if needed else LandingOutcome.LANDED)


async def test_a_wait_ends_when_its_store_is_killed(asking: Asking) -> None:
    waiting = asyncio.create_task(asking.wait(Prompt()))
    await asking.paused.wait()
    await asking.backend.kill()
    async with asyncio.timeout(LONG_S):
        assert (await waiting).outcome is LandingOutcome.STORE_AWAY


async def test_a_landing_outlasts_a_store_that_answers_late_where_engines_need_it(
    asking: Asking,
) -> None:
    prompt = Prompt()
    await asking.backend.stall()
    waiting = asyncio.create_task(asking.wait(prompt))
    await until(lambda: asking.view.peer.slow or waiting.done(), LONG_S)
    await asking.backend.mend()
    await asking.backend.hold(prompt, range(BLOCKS))
    needed = asking.view.catalogue.keeps_engines
    outcome = LandingOutcome.LANDED if needed else LandingOutcome.STORE_AWAY
    assert (await waiting).outcome is outcome


async def test_a_store_that_hangs_holds_up_one_request_for_one_answer(asking: Asking) -> None:
    prompt = Prompt()
    await asking.backend.hold(prompt, range(BLOCKS))
    await asking.backend.stall()
    async with asyncio.timeout(5 * ANSWER_S):
        assert await asking.match(prompt) == 0
    assert not asking.view.peer.connected
    assert await asking.match(prompt) == 0
    await asking.backend.mend()
    await asking.until_connected()
    assert await asking.match(prompt) == BLOCKS


async def test_a_cancelled_wait_leaves_nothing_behind(asking: Asking) -> None:
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(asking.wait(Prompt()))
    await asking.paused.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.all_tasks() <= before
