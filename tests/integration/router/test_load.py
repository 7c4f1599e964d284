"""What a request counts for on its engines, from its plan to its end."""

import asyncio
from array import array
from typing import Any

import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess, put_chain
from tests.integration.router.ahead import MANIFEST
from tests.integration.router.conftest import Open, Site, metric, text

from kvrouter.engines.engine import Role
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import hash_tokens, root_hash

Counts = list[tuple[int, int]]
IDS = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))


def put_chain_of(node: StoreProcess, ids: list[int]) -> None:
    """Put all whole blocks of a prompt into the store."""
    hashes = hash_tokens(array("I", ids), BLOCK_TOKENS, root=root_hash(None)).data
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, hashes)


def loads(here: Site, *, decode: bool = True) -> Counts:
    """Legs under way and tokens of each engine."""
    engines = [
        here.app.core.pool.find(e.address) for e in (here.decode if decode else here.prefill)
    ]
    return [(e.requests, e.tokens) for e in engines if e is not None]


async def test_a_decode_engine_is_loaded_from_the_plan_on(site: Open) -> None:
    here = await site(policy="least_tokens")
    for engine in (*here.prefill, *here.decode):
        engine.mode = "held"
    task = asyncio.create_task(here.post(text(prompt=[7] * 30, max_tokens=50)))
    await here.prefill[0].next_began()
    assert loads(here, decode=False) == [(1, 30)]
    assert loads(here) == [(0, 80)]
    here.prefill[0].go.set()
    await here.decode[0].next_began()
    assert loads(here, decode=False) == [(0, 0)]
    assert loads(here) == [(1, 80)]
    here.decode[0].go.set()
    assert (await task)[0] == 200
    assert loads(here) == [(0, 0)]


async def test_prompts_planned_during_a_long_prefill_see_where_it_will_be_decoded(
    site: Open,
) -> None:
    here = await site(1, 2, policy="least_tokens")
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text(max_tokens=2000)))]
    await here.prefill[0].next_began()
    for _ in range(6):
        tasks.append(asyncio.create_task(here.post(text(max_tokens=10))))
        await here.prefill[0].next_began()
    large = max(loads(here), key=lambda load: load[1])
    assert large[1] < 2010  # none of the six joined it
    here.prefill[0].go.set()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 7
    assert sorted(len(engine.requests) for engine in here.decode) == [1, 6]


@pytest.mark.parametrize("mode", ["500", "drop", "hang", "held"])
async def test_a_client_that_leaves_or_a_leg_that_fails_gives_both_places_back(
    site: Open, mode: str
) -> None:
    here = await site(2, 2, policy="least_tokens", recompute_budget_tokens=0)
    for engine in here.prefill:
        engine.mode = mode
    task = asyncio.create_task(here.post(text(max_tokens=100)))
    await until(lambda: any(engine.requests for engine in here.prefill))
    if mode in ("hang", "held"):
        assert sum(tokens for _, tokens in loads(here)) == 104
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        assert (await task)[0] == 429
    await until(lambda: loads(here) + loads(here, decode=False) == [(0, 0)] * 4)


async def test_a_decode_leg_that_goes_elsewhere_takes_its_load_along(site: Open) -> None:
    here = await site(1, 2, policy="least_tokens")
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text(max_tokens=100)))
    await here.prefill[0].next_began()
    chosen = next(at for at, load in enumerate(loads(here)) if load[1])
    other = 1 - chosen
    await here.decode[chosen].stop()
    here.decode[other].mode = "held"
    here.prefill[0].go.set()
    await here.decode[other].next_began()
    assert loads(here)[other] == (1, 104)
    assert loads(here)[chosen] == (0, 0)
    here.decode[other].go.set()
    assert (await task)[0] == 200


async def test_an_engine_that_is_drained_waits_for_no_leg_that_was_only_planned(
    site: Open,
) -> None:
    here = await site(1, 2, policy="least_tokens")
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text(max_tokens=100)))
    await here.prefill[0].next_began()
    chosen = next(e for e in here.app.core.pool.all() if e.tokens == 104)
    assert here.app.core.pool.drain(chosen)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert (chosen.requests, chosen.tokens) == (0, 0)


async def test_prefill_legs_are_ranked_by_their_work_within_the_clients_own_priority(
    site: Open,
) -> None:
    here = await site()
    for prompt, more in (([7] * 40, {}), ([7] * 4000, {}), ([7] * 40, {"priority": 1})):
        assert (await here.post(text(prompt=prompt, **more)))[0] == 200
    short, long, later = (body["priority"] for body in here.prefill[0].requests)
    assert 0 < short < long < later
    assert [body.get("priority") for body in here.decode[0].requests] == [None, None, 1]


async def test_the_router_ranks_nothing_where_it_is_told_not_to(site: Open) -> None:
    here = await site(prefill_priority="off")
    for more in ({}, {"priority": 3}):
        assert (await here.post(text(**more)))[0] == 200
    assert [body.get("priority") for body in here.prefill[0].requests] == [None, 3]


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


async def planned(here: Site, **more: Any) -> tuple["asyncio.Task[Any]", int]:
    """A request whose prefill leg has begun, and which decode engine it was planned for."""
    before = loads(here)
    task = asyncio.create_task(here.post(text(prompt=IDS, **more)))
    await here.prefill[0].next_began()
    after = loads(here)
    return task, next(at for at, load in enumerate(after) if load != before[at])


async def test_a_decode_leg_goes_where_there_is_less_to_do_when_its_kv_has_landed(
    site: Open, node: StoreProcess
) -> None:
    here = await site(1, 2, store=node.url, policy="least_tokens", prepare=announce)
    here.prefill[0].mode = "held"
    task, chosen = await planned(here, max_tokens=50)
    busy, idle = (here.app.core.pool.find(here.decode[at].address) for at in (chosen, 1 - chosen))
    assert busy is not None
    assert idle is not None
    others = here.app.core.pool.reserve(busy, 1000)
    await asyncio.to_thread(put_chain_of, node, IDS)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert [len(e.requests) for e in (here.decode[chosen], here.decode[1 - chosen])] == [0, 1]
    assert await metric(here, "kvrouter:decode_rebound_total") == 1
    others.release()


async def test_its_own_load_does_not_drive_a_decode_leg_away(
    site: Open, node: StoreProcess
) -> None:
    here = await site(1, 2, store=node.url, policy="least_tokens", prepare=announce)
    here.prefill[0].mode = "held"
    task, chosen = await planned(here, max_tokens=1000)
    await asyncio.to_thread(put_chain_of, node, IDS)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert len(here.decode[chosen].requests) == 1
    assert await metric(here, "kvrouter:decode_rebound_total") == 0


@pytest.mark.parametrize("what", ["drained", "gone"])
async def test_a_decode_engine_that_left_during_prefill_costs_no_attempt(
    site: Open, node: StoreProcess, what: str
) -> None:
    here = await site(1, 2, store=node.url, policy="prefix", prepare=announce)
    here.prefill[0].mode = "held"
    task, chosen = await planned(here, max_tokens=50)
    engine = here.app.core.pool.find(here.decode[chosen].address)
    assert engine is not None
    if what == "drained":
        here.app.core.pool.drain(engine)
    else:
        await here.decode[chosen].stop()
        await until(lambda: engine.identity is None)
    await asyncio.to_thread(put_chain_of, node, IDS)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert len(here.decode[1 - chosen].requests) == 1
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="decode"') == 0


async def test_a_decode_leg_stays_where_its_kv_did_not_land(site: Open, node: StoreProcess) -> None:
    here = await site(
        1, 2, store=node.url, policy="least_tokens", prepare=announce, landing_timeout_s=0.05
    )
    here.prefill[0].mode = "held"
    task, chosen = await planned(here, max_tokens=50)
    busy = here.app.core.pool.find(here.decode[chosen].address)
    assert busy is not None
    others = here.app.core.pool.reserve(busy, 1000)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert len(here.decode[chosen].requests) == 1
    others.release()


async def test_a_decode_engine_computes_prompts_itself_up_to_the_threshold_at_a_time(
    site: Open,
) -> None:
    here = await site(prefill_threshold=60)
    here.decode[0].mode = "held"
    first = asyncio.create_task(here.post(text(prompt=[7] * 50, stream=True)))
    await here.decode[0].next_began()
    assert [e.computing_tokens for e in here.app.core.pool.engines(Role.DECODE)] == [50]
    second = asyncio.create_task(here.post(text(prompt=[8] * 50)))
    assert (await here.prefill[0].next_began())["prompt"] == [8] * 50
    here.decode[0].go.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    assert (await here.post(text(prompt=[9] * 50)))[0] == 200
    assert [len(e.requests) for e in (here.prefill[0], here.decode[0])] == [1, 3]


@pytest.mark.parametrize("mode", ["ok", "drop_mid", "hang_mid"])
async def test_a_prompt_is_computed_when_the_answer_begins_however_it_ends(
    site: Open, mode: str
) -> None:
    here = await site(prefill_threshold=60, request_timeout_s=0.2)
    here.decode[0].mode = mode
    assert (await here.post(text(prompt=[7] * 50, stream=True)))[0] == 200
    assert [e.computing_tokens for e in here.app.core.pool.engines(Role.DECODE)] == [0]


async def test_prompts_of_one_burst_that_begin_alike_go_to_one_prefill_engine(
    site: Open, node: StoreProcess
) -> None:
    here = await site(2, 2, store=node.url, policy="prefix", prepare=announce)
    for engine in here.prefill:
        engine.mode = "held"
    shared = list(range(500, 500 + 20 * BLOCK_TOKENS))
    prompts = [[*shared, *range(1000 * part, 1000 * part + 20)] for part in (1, 2, 3)]
    other = list(range(9000, 9200))
    tasks: list[asyncio.Task[Any]] = []
    for prompt in (other, *prompts):
        tasks.append(asyncio.create_task(here.post(text(prompt=prompt, max_tokens=1))))
        await until(lambda: sum(len(e.requests) for e in here.prefill) == len(tasks))
    (full, empty) = sorted(here.prefill, key=lambda e: len(e.requests), reverse=True)
    assert [body["prompt"] for body in full.requests] == prompts
    assert [body["prompt"] for body in empty.requests] == [other]
    computed = [tokens for _, tokens in sorted(loads(here, decode=False))]
    assert computed == [200, sum(map(len, prompts)) - 2 * 16 * BLOCK_TOKENS]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
