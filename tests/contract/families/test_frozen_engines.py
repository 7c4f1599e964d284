"""An engine of any family freezes with a leg on it: it is found dead, and another takes the leg."""

import asyncio

import pytest
from tests.contract.families.conftest import KINDS, Open, Site, ids
from tests.fakes.patience import until
from tests.fakes.pd import PdEngine

from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import LegOrder

SOON = {"health_timeout_s": 0.5, "health_failure_threshold": 2}
SPLIT = [family for family in KINDS if FAMILIES[family].order is not LegOrder.SINGLE]


async def asked_frozen(here: Site, engines: list[PdEngine], *, stream: bool) -> PdEngine:
    await until(lambda: all(engine.identity for engine in here.app.core.pool.all()))
    for engine in engines:
        engine.mode = "hang"
    task = asyncio.create_task(here.same(ids(stream=stream)))
    await until(lambda: any(engine.requests for engine in engines))
    frozen = next(engine for engine in engines if engine.requests)
    frozen.thawed.clear()
    for engine in engines:
        engine.mode = "hang" if engine is frozen else "ok"
    await task
    return frozen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", SPLIT)
async def test_a_prefill_leg_on_a_frozen_engine_is_sent_again(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 2, 1, **SOON)
    frozen = await asked_frozen(here, here.prefill, stream=stream)
    assert [len(engine.requests) for engine in here.prefill] == [1, 1]
    assert await here.metric('kvrouter:upstream_errors_total{leg="prefill",reason="dead"}') == 1
    assert await here.metric('kvrouter:engines_left_total{cause="silent"}') == 1
    assert not here.app.core.pool.target(frozen.address).identity  # type: ignore[union-attr]
    frozen.mode = "ok"
    frozen.thawed.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", KINDS)
async def test_a_decode_leg_on_a_frozen_engine_is_sent_again(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, int(family in SPLIT), 2, **SOON)
    frozen = await asked_frozen(here, here.decode, stream=stream)
    assert await here.metric('kvrouter:upstream_errors_total{leg="decode",reason="dead"}') == 1
    assert len(here.decode[0].requests) == len(here.decode[1].requests) == 1
    pool = here.app.core.pool
    frozen.mode = "ok"
    frozen.thawed.set()
    await until(lambda: all(engine.identity for engine in pool.all()))
    for at in range(4):
        await here.same(ids(500 + at))
    assert all(len(engine.requests) >= 2 for engine in here.decode)


def with_ranks(engines: list[PdEngine]) -> None:
    for engine in engines:
        engine.ranks = 2


@pytest.mark.parametrize("family", ["store", "sglang"])
async def test_legs_on_all_ranks_of_a_frozen_engine_are_sent_again(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 2, prepare=with_ranks, **SOON)
    frozen, other = here.decode
    frozen.mode, other.mode = "hang", "held"
    tasks = [asyncio.create_task(here.same(ids(300 + at))) for at in range(8)]
    await until(lambda: len(frozen.requests) == len(other.requests) == 4)
    assert set(frozen.ranks_of) == {0, 1}
    frozen.thawed.clear()
    other.mode = "ok"
    other.go.set()
    await asyncio.gather(*tasks)
    assert await here.metric('kvrouter:upstream_errors_total{leg="decode",reason="dead"}') == 4
    frozen.mode = "ok"
    frozen.thawed.set()


async def test_prompts_that_wait_for_a_frozen_engine_go_on_without_it(open_site: Open) -> None:
    here = await open_site("store", 1, 1, policy="planner", prefill_threshold=0, **SOON)
    frozen, queue = here.prefill[0], here.app.services.queue
    assert queue is not None
    frozen.mode = "hang"
    prompts = [ids(prompt=list(range(first, 3000 + first))) for first in (100, 200)]
    tasks = [asyncio.create_task(here.same(prompt)) for prompt in prompts]
    await until(lambda: frozen.requests and queue.queue.waiting)
    frozen.thawed.clear()
    await asyncio.gather(*tasks)
    assert len(frozen.requests) == 1
    assert not queue.queue.waiting
    frozen.mode = "ok"
    frozen.thawed.set()
