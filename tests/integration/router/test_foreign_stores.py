"""A router before engines on a store of another project, and no node of ours."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.foreign_stores import FakeCoordinator, FakeMaster
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, metric, text

from kvrouter.http.server.exchange import Exchange
from kvrouter_store.identity.chain import hash_tokens, root_hash

IDS = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))
HASHES = bytes(hash_tokens(array("I", IDS), BLOCK_TOKENS, root=root_hash(None)).data)
CARD = {"id": "m", "root": "/models/tiny", "max_model_len": 4096}
PAGES = {
    "/metrics": b'vllm:cache_config_info{block_size="%d",num_gpu_blocks="9"} 1\n' % BLOCK_TOKENS,
    "/v1/models": json.dumps({"data": [CARD]}).encode(),
}


def as_vllm(engines: list[FakeEngine]) -> None:
    """Engines whose connector says nothing: only their pages do."""

    def page(body: bytes) -> Callable[[Exchange], "asyncio.Future[None]"]:
        async def answer(exchange: Exchange) -> None:
            exchange.respond(200, body)

        return answer  # type: ignore[return-value]

    for engine in engines:
        engine.pages.update({path: page(body) for path, body in PAGES.items()})


@pytest_asyncio.fixture
async def master() -> AsyncIterator[FakeMaster]:
    store = FakeMaster()
    await store.start()
    yield store
    store.answers.set()
    await store.stop()


def hold(store: FakeMaster, blocks: int) -> None:
    name = "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
    store.keys.update(name + HASHES[32 * n : 32 * n + 32].hex() for n in range(blocks))


async def opened(site: Open, store: FakeMaster | FakeCoordinator, **settings: object) -> Site:
    given = {"landing_timeout_s": 30, "prepare": as_vllm, **settings}
    return await site(store=store.url, **given)


async def test_decode_waits_until_all_blocks_are_in_the_store(
    site: Open, master: FakeMaster
) -> None:
    here = await opened(site, master)
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    master.asked.clear()
    await master.asked.wait()
    hold(master, 2)
    master.asked.clear()
    await master.asked.wait()
    assert here.decode[0].requests == []
    hold(master, 3)
    assert (await task)[0] == 200
    assert await metric(here, 'kvrouter:landings_total{outcome="landed"}') == 1
    assert await metric(here, "kvrouter:handoff_missing_total") == 0
    assert await metric(here, "kvrouter:recompute_tokens") == 0


async def test_what_the_store_holds_takes_no_prefill_leg(site: Open, master: FakeMaster) -> None:
    hold(master, 3)
    here = await opened(site, master, policy="prefix")
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert here.prefill[0].requests == []
    line = 'kvrouter:prefix_hit_tokens_total{model="m",source="store"}'
    assert await metric(here, line) == 3 * BLOCK_TOKENS


async def test_any_decode_engine_can_load_what_has_landed(site: Open, master: FakeMaster) -> None:
    here = await opened(site, master, prefill=1, decode=2, policy="least_tokens")
    for engine in here.decode:
        engine.mode = "held"
    task = asyncio.create_task(here.post(text(prompt=IDS, max_tokens=1)))
    await here.prefill[0].next_began()
    planned = next(e for e in here.app.core.pool.all() if e.tokens and e.role == "decode")
    planned.tokens += 100_000
    hold(master, 3)
    await until(lambda: sum(len(e.requests) for e in here.decode) == 1)
    planned.tokens -= 100_000
    (busy,) = [e for e in here.decode if e.address == planned.address]
    assert busy.requests == []
    for engine in here.decode:
        engine.go.set()
    assert (await task)[0] == 200
    assert await metric(here, "kvrouter:decode_rebound_total") == 1


async def test_what_does_not_land_takes_from_the_budget(site: Open, master: FakeMaster) -> None:
    hold(master, 1)
    here = await opened(site, master, landing_timeout_s=0.05, recompute_budget_tokens=0)
    assert (await here.post(text(prompt=IDS)))[0] == 429
    assert await metric(here, 'kvrouter:landings_total{outcome="timeout"}') == 1


async def test_without_the_store_requests_go_on_and_health_says_so(
    site: Open, master: FakeMaster
) -> None:
    await master.stop()
    here = await opened(site, master, policy="prefix")
    assert (await here.post(text(prompt=IDS)))[0] == 200
    status, body = await here.get("/health")
    assert status == 200
    assert b"store" in body
    await master.start()
    hold(master, 3)
    await until(lambda: here.app.core.store is not None and not here.app.core.store.away)
    assert b"store" not in (await here.get("/health"))[1]
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert len(here.prefill[0].requests) == 1


async def test_a_coordinator_that_is_away_costs_no_budget(site: Open) -> None:
    """LMCache's servers go on without it: the prefill leg's answer counts as the landing."""
    coordinator = FakeCoordinator("?chunk_size=16", 16)
    await coordinator.start()
    await coordinator.stop()
    here = await opened(site, coordinator, recompute_budget_tokens=0)
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert await metric(here, 'kvrouter:landings_total{outcome="store_away"}') == 1


@pytest.mark.parametrize(
    ("reused", "timeout_s", "outcome"), [(None, 0.05, "timeout"), (3 * BLOCK_TOKENS, 30, "landed")]
)
async def test_a_coordinator_that_forgot_costs_no_budget_whether_engines_tell_what_they_reuse(
    site: Open, reused: int | None, timeout_s: float, outcome: str
) -> None:
    coordinator = FakeCoordinator("?chunk_size=16", 16)
    await coordinator.start()
    settings = {"recompute_budget_tokens": 0, "landing_timeout_s": timeout_s}
    here = await opened(site, coordinator, **settings)
    here.prefill[0].cached_tokens = reused
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert await metric(here, f'kvrouter:landings_total{{outcome="{outcome}"}}') == 1
    await coordinator.stop()


async def test_a_client_that_leaves_ends_the_wait(site: Open, master: FakeMaster) -> None:
    here = await opened(site, master)
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    master.asked.clear()
    await master.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: here.app.core.metrics.running == 0)
    asked = master.questions
    assert (await here.get("/health"))[0] == 200
    assert master.questions == asked


async def test_the_status_page_shows_the_store(site: Open, master: FakeMaster) -> None:
    here = await opened(site, master, control_port=0)
    assert here.app.snapshots is not None
    await here.app.snapshots.stores.poll()
    (card,) = here.app.snapshots.stores.cards()
    assert (card.url, card.connected, card.problem, card.tiers) == (master.url, True, None, [])
