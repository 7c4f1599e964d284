"""NixlConnector: a hand-off is fetched once, while it is there, by the engine that it is for."""

import asyncio

from tests.contract.families.conftest import Open, ids
from tests.fakes.patience import until
from tests.fakes.pd import PdEngine
from tests.fakes.pd_nixl import NixlEngine


def nixl(engines: list[PdEngine]) -> list[NixlEngine]:
    assert all(isinstance(engine, NixlEngine) for engine in engines)
    return engines  # type: ignore[return-value]


async def test_an_engine_that_fails_after_it_fetched_leaves_nothing_to_fetch(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 1, 2)
    for engine in here.decode:
        engine.mode = "drop_mid"  # it fetches, and then its whole answer breaks off
    status, _ = await here.post(ids())
    assert status == 503
    assert len(here.prefill[0].requests) == len(here.decode[0].requests + here.decode[1].requests)
    for engine in here.decode:
        engine.mode = "ok"
    await here.same(ids())


async def test_an_engine_that_was_never_reached_leaves_the_hand_off_to_another(
    open_site: Open,
) -> None:
    here = await open_site("nixl", 1, 2)
    await here.decode[0].stop()
    for first in range(4):
        await here.same(ids(300 + first))
    assert len(here.prefill[0].requests) == 4
    assert nixl(here.decode)[1].fetched == 4


async def test_without_any_decode_engine_what_is_stranded_is_counted(open_site: Open) -> None:
    def short_lease(engines: list[PdEngine]) -> None:
        nixl(engines)[0].lease_s = 0.2

    here = await open_site("nixl", 1, 1, prepare=short_lease)
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(ids()))
    await here.prefill[0].next_began()
    await here.decode[0].stop()
    here.prefill[0].go.set()
    assert (await task)[0] == 503
    line = 'kvrouter:stranded_release_total{outcome="stranded"}'
    async with asyncio.timeout(10):
        while not await here.metric(line):
            pass
    await until(lambda: not here.prefill[0].held)


async def test_a_prefill_leg_that_hands_nothing_over_is_recomputed_and_counted(
    open_site: Open,
) -> None:
    here = await open_site("nixl")
    nixl(here.prefill)[0].tells = False
    await here.same(ids())
    assert here.decode[0].computed == 2  # its introduction, and this
    assert await here.metric('kvrouter:handoff_missing_total{cause="not_named"}') == 1


async def test_hand_offs_do_not_pass_between_families(open_site: Open) -> None:
    here = await open_site("nixl", kv_connector="store")
    await here.same(ids())
    for engine in here.engines:
        assert not any("kv_transfer_params" in body for body in engine.requests)
