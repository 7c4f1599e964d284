"""Pairs of engines between which hand-overs fail, while both do everything else well.

The real case: smg issue 2382, "3 of 4 prefills poisoned, 100 % errors, all pods Ready".
"""

import asyncio
import logging

import pytest
from tests.contract.families.conftest import Open, Site, ids
from tests.fakes.patience import until
from tests.fakes.pd import PdEngine
from tests.fakes.pd_nixl import NixlEngine

from kvrouter.engines.breaker import BreakerState


def nixl(engines: list[PdEngine]) -> list[NixlEngine]:
    assert all(isinstance(engine, NixlEngine) for engine in engines)
    return engines  # type: ignore[return-value]


def poison(here: Site, *prefill: int) -> None:
    """The agents of these prefill engines have stale state of every decode engine."""
    for number in prefill:
        nixl(here.prefill)[number].poisoned = {engine.name for engine in here.decode}


async def ask(here: Site, count: int) -> None:
    for first in range(count):
        await here.same(ids(300 + first))


def open_pairs(here: Site) -> set[tuple[str, str]]:
    pairs = here.app.core.pool.pairs
    return {
        (prefill.address, decode.address)
        for prefill, decode, breaker in pairs
        if breaker.state is not BreakerState.CLOSED
    }


@pytest.mark.parametrize("poisoned", [(0,), (0, 1, 2)], ids=["one", "three of four"])
async def test_poisoned_prefill_engines_cost_no_answer_and_no_decode_engine(
    open_site: Open, poisoned: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    here = await open_site("nixl", 4, 2, cb_timeout_s=60.0, cb_max_timeout_s=60.0)
    poison(here, *poisoned)
    with caplog.at_level(logging.WARNING):
        await ask(here, 40)
    bad = {(here.prefill[p].address, d.address) for p in poisoned for d in here.decode}
    assert open_pairs(here) == bad
    assert caplog.text.count("hands over") == len(bad)
    for engine in here.decode:
        found = here.app.core.pool.find(engine.address)
        assert found is not None
        assert here.app.core.pool.state(found) is BreakerState.CLOSED
    before = [len(engine.requests) for engine in here.prefill]
    await ask(here, 8)
    after = [len(engine.requests) for engine in here.prefill]
    assert sum(after) - sum(before) == 8
    assert [after[number] for number in poisoned] == [before[number] for number in poisoned]
    first = f'kvrouter:pair_circuit_state{{decode="{here.decode[0].address}"'
    assert await here.metric(first) == 2 * len(poisoned)


async def test_a_prefill_engine_is_poisoned_for_one_peer_and_serves_the_others(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 1, 2, cb_timeout_s=60.0, cb_max_timeout_s=60.0)
    nixl(here.prefill)[0].poisoned = {here.decode[0].name}
    await ask(here, 12)
    assert open_pairs(here) == {(here.prefill[0].address, here.decode[0].address)}
    before = len(here.decode[0].requests)
    await ask(here, 4)
    assert len(here.decode[0].requests) == before
    assert nixl(here.decode)[1].fetched >= 12


async def test_the_next_try_has_a_prefill_engine_that_did_not_fail_as_a_source(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 2, 3, policy="prefix", cb_failure_threshold=100)
    await here.same(ids())
    has_it = here.prefill.index(next(engine for engine in here.prefill if engine.requests))
    poison(here, has_it)
    computed = [engine.computed for engine in here.decode]
    for _ in range(4):  # the policy chooses the engine that has the prompt already
        await here.same(ids())
    assert len(here.prefill[has_it].requests) > 1
    assert [engine.computed for engine in here.decode] == computed


async def test_one_of_many_requests_is_the_trial_of_a_pair(open_site: Open) -> None:
    here = await open_site("nixl", 1, 1, cb_failure_threshold=1, cb_timeout_s=1.0)
    poison(here, 0)
    await here.same(ids())
    ((_, _, breaker),) = here.app.core.pool.pairs
    await until(lambda: breaker.state is BreakerState.HALF_OPEN)
    before = len(here.prefill[0].requests)
    await asyncio.gather(*(here.same(ids(300 + first)) for first in range(6)))
    assert len(here.prefill[0].requests) == before + 1


async def test_where_all_pairs_fail_decode_engines_compute_until_a_trial_works(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 1, 1, cb_timeout_s=0.02, cb_max_timeout_s=0.02)
    poison(here, 0)
    await ask(here, 4)
    assert len(open_pairs(here)) == 1
    nixl(here.prefill)[0].poisoned = set()

    async def works() -> bool:
        await here.same(ids())
        return not here.app.core.pool.pairs

    await until(works)
    fetched = nixl(here.decode)[0].fetched
    await ask(here, 2)
    assert nixl(here.decode)[0].fetched == fetched + 2


async def test_what_decode_engines_compute_for_failed_pairs_has_the_budget_of_recomputation(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 1, 1, recompute_budget_tokens=0)
    poison(here, 0)
    assert (await here.post(ids()))[0] == 429


async def test_a_restart_makes_pairs_whole(open_site: Open) -> None:
    here = await open_site("nixl", 1, 1, cb_timeout_s=60.0, cb_max_timeout_s=60.0)
    poison(here, 0)
    await ask(here, 4)
    assert len(open_pairs(here)) == 1
    prefill = nixl(here.prefill)[0]
    await prefill.stop()
    prefill.poisoned = set()
    await here.same(ids())
    await until(lambda: not here.app.core.pool.pairs)
    await prefill.start()
    pool = here.app.core.pool
    found = pool.find(prefill.address)
    await until(lambda: found is not None and found.identity is not None)
    fetched = nixl(here.decode)[0].fetched
    await here.same(ids())
    assert nixl(here.decode)[0].fetched == fetched + 1


async def test_a_request_that_fails_everywhere_opens_no_pair(open_site: Open) -> None:
    here = await open_site("nixl", 2, 2, cb_failure_threshold=1)
    for engine in here.decode:
        engine.mode = "500"
    assert (await here.post(ids()))[0] == 500
    assert not here.app.core.pool.pairs
