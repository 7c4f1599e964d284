"""With `--policy planner` prompts wait at the router for a prefill engine."""

import asyncio
import re
from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import MANIFEST, await_stat, land
from tests.integration.router.conftest import Open, Site, metric, text

from kvrouter.app.process import drain
from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Role
from kvrouter.http.failure import Failure

PLANNER = {"policy": "planner", "prefill_threshold": 0}
TOKENS = 5000


def prompt(tokens: int = TOKENS, **more: object) -> dict[str, object]:
    return text(prompt=list(range(tokens)), **more)


async def waiting(here: Site, count: int) -> None:
    queue = here.app.services.queue
    assert queue is not None
    await until(lambda: len(queue.queue.waiting) == count)


async def occupied(site: Open, prefill: int = 1, **settings: object) -> tuple[Site, list["Leg"]]:
    """A site whose prefill engines each compute a prompt until `go` is set."""
    here = await site(prefill, 1, **{**PLANNER, **settings})
    legs = []
    for engine in here.prefill:
        engine.mode = "held"
    for number in range(prefill):
        legs.append(asyncio.create_task(here.post(prompt(user=f"first {number}"))))
    await asyncio.gather(*(engine.next_began() for engine in here.prefill))
    return here, legs


Leg = asyncio.Task[tuple[int, dict[str, str], bytes]]


def users(engine: FakeEngine) -> list[object]:
    return [request.get("user") for request in engine.requests]


async def test_prompts_wait_for_the_engine_and_the_shortest_goes_first(site: Open) -> None:
    here, legs = await occupied(site)
    for count, (user, tokens) in enumerate([("long", 9000), ("short", 3000)], 1):
        legs.append(asyncio.create_task(here.post(prompt(tokens, user=user))))
        await waiting(here, count)
    assert users(here.prefill[0]) == ["first 0"]
    assert await metric(here, 'kvrouter:num_requests_waiting_by_reason{reason="prefill"}') == 2
    assert await metric(here, "kvrouter:prefill_queue_seconds") > 1
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200] * 3
    assert users(here.prefill[0]) == ["first 0", "short", "long"]
    assert await metric(here, "kvrouter:prefill_queue_seconds") == 0


async def test_an_idle_engine_is_asked_at_once(site: Open) -> None:
    here = await site(1, 1, **PLANNER)
    assert [(await here.post(prompt()))[0] for _ in range(3)] == [200] * 3
    assert len(here.prefill[0].requests) == 3


async def test_a_client_that_leaves_gives_up_its_place(site: Open) -> None:
    here, legs = await occupied(site)
    gone = asyncio.create_task(here.post(prompt(3000, user="gone")))
    await waiting(here, 1)
    legs.append(asyncio.create_task(here.post(prompt(user="stays"))))
    await waiting(here, 2)
    gone.cancel()
    await waiting(here, 1)
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200] * 2
    assert users(here.prefill[0]) == ["first 0", "stays"]


async def test_prompts_wait_no_longer_for_engines_that_are_gone(site: Open) -> None:
    here, legs = await occupied(site, 2)
    legs.append(asyncio.create_task(here.post(prompt(user="waits"))))
    await waiting(here, 1)
    for engine in here.prefill:
        found = here.app.core.pool.find(engine.address)
        assert found is not None
        here.app.core.pool.leave(found)
        engine.mode = "refuse"
    await until(lambda: "waits" in users(here.decode[0]))
    assert (await legs[2])[0] == 200
    for engine in here.prefill:
        engine.go.set()
    assert [(await leg)[0] for leg in legs[:2]] == [200] * 2


async def test_a_broken_leg_lets_the_next_prompt_go(site: Open) -> None:
    here, legs = await occupied(site)
    legs.append(asyncio.create_task(here.post(prompt(user="next"))))
    await waiting(here, 1)
    legs[0].cancel()
    await until(lambda: "next" in users(here.prefill[0]))
    here.prefill[0].go.set()
    assert (await legs[1])[0] == 200


async def test_an_engine_that_crashes_keeps_nobody_waiting(site: Open) -> None:
    here, legs = await occupied(site, cb_failure_threshold=1)
    legs.append(asyncio.create_task(here.post(prompt(user="waits"))))
    await waiting(here, 1)
    await here.prefill[0].stop()
    assert [(await leg)[0] for leg in legs] == [200] * 2  # by the decode engine alone
    assert users(here.prefill[0]) == ["first 0"]
    here.prefill[0].mode = "ok"
    await here.prefill[0].start()
    await until(lambda: here.app.core.pool.engines(Role.PREFILL, "m"))
    assert (await here.post(prompt(user="later")))[0] == 200
    assert users(here.prefill[0]) == ["first 0", "later"]


async def test_a_prompt_that_waits_is_the_trial_of_an_engine_that_failed(site: Open) -> None:
    here = await site(2, 1, **PLANNER, cb_failure_threshold=1, cb_timeout_s=1.0)
    failed, busy = here.prefill
    broken = here.app.core.pool.find(failed.address)
    assert broken is not None
    busy.mode = "held"
    here.app.core.pool.failed(broken, Failure.STATUS)
    legs = [asyncio.create_task(here.post(prompt(120_000, user="long")))]  # 13 s
    await busy.next_began()
    legs.append(asyncio.create_task(here.post(prompt(user="waits"))))
    await waiting(here, 1)
    assert not users(failed)
    await until(lambda: users(failed) == ["waits"], 5.0)
    assert (await legs[1])[0] == 200
    assert here.app.core.pool.state(broken) is BreakerState.CLOSED
    busy.go.set()
    assert (await legs[0])[0] == 200


async def test_a_breaker_that_opens_leaves_prompts_to_decode_engines(site: Open) -> None:
    here, legs = await occupied(site, cb_failure_threshold=1, cb_timeout_s=60.0)
    legs.append(asyncio.create_task(here.post(prompt(user="waits"))))
    await waiting(here, 1)
    here.prefill[0].mode = "drop"
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200] * 2
    assert users(here.prefill[0]) == ["first 0"]
    await waiting(here, 0)


async def test_a_router_that_stops_lets_waiting_prompts_have_their_answers(site: Open) -> None:
    here, legs = await occupied(site)
    legs.append(asyncio.create_task(here.post(prompt(stream=True))))
    await waiting(here, 1)
    public, at_once = here.app.ports.public, asyncio.Event()
    stops = asyncio.create_task(drain(public, delay_s=0.0, timeout_s=60.0, at_once=at_once))
    await until(lambda: public.draining)
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200] * 2
    assert (await legs[1])[2].endswith(b"data: [DONE]\n\n")
    assert await stops


async def test_a_router_that_stops_at_once_gives_up_every_place(site: Open) -> None:
    here, legs = await occupied(site)
    legs.append(asyncio.create_task(here.post(prompt())))
    await waiting(here, 1)
    public, at_once = here.app.ports.public, asyncio.Event()
    at_once.set()
    assert not await drain(public, delay_s=0.0, timeout_s=60.0, at_once=at_once)
    await here.app.close()
    assert [(await leg)[0] for leg in legs] == [503] * 2
    await waiting(here, 0)


async def test_a_wait_ends_with_the_time_that_an_engine_may_take(site: Open) -> None:
    here, legs = await occupied(site, request_timeout_s=0.5)
    status, fields, body = await here.post(prompt())
    assert status == 503
    assert b"No prefill engine was free" in body
    assert int(fields["retry-after"]) >= 1
    here.prefill[0].go.set()
    await asyncio.gather(*legs)


async def test_a_prompt_that_would_come_too_late_is_refused_with_the_time_to_wait(
    site: Open,
) -> None:
    here, legs = await occupied(site, max_predicted_ttft_s=1.5)
    legs.append(asyncio.create_task(here.post(prompt())))
    await waiting(here, 1)
    status, fields, body = await here.post(prompt(9000))
    assert status == 429
    assert b"is predicted in" in body
    assert fields["retry-after"] == "2"  # the one that runs, and the one that waits
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200] * 2


async def test_a_prompt_that_need_not_wait_is_never_refused_for_those_that_do(site: Open) -> None:
    here, legs = await occupied(site, prefill_threshold=2048, max_predicted_ttft_s=0.001)
    assert (await here.post(prompt(9000)))[0] == 429
    assert (await here.post(prompt(1000)))[0] == 200
    here.prefill[0].go.set()
    assert [(await leg)[0] for leg in legs] == [200]


async def test_by_default_decode_engines_compute_short_prompts(site: Open) -> None:
    here = await site(1, 1, policy="planner")
    assert (await here.post(prompt(2000)))[0] == 200
    assert not here.prefill[0].requests


async def test_answers_say_how_long_a_prompt_was_predicted_to_take(site: Open) -> None:
    here = await site(1, 1, **PLANNER, route_headers=True)
    _, fields, _ = await here.post(prompt())
    assert re.fullmatch(r"prefill; predicted=0\.[5-9]\d*", fields["x-kvrouter-plan"])


async def test_what_a_stream_loses_to_a_prompt_beside_it_is_counted(site: Open) -> None:
    here = await site(1, 1, policy="planner")
    here.decode[0].mode = "hang_mid"
    stream = asyncio.create_task(here.post(prompt(500, stream=True)))
    await here.decode[0].next_began()
    assert await metric(here, "kvrouter:streams_stalled_seconds_total") == 0
    here.decode[0].mode = "ok"
    assert (await here.post(prompt(500)))[0] == 200
    assert await metric(here, "kvrouter:streams_stalled_seconds_total") > 0
    stream.cancel()


async def test_while_a_prompt_waits_the_store_brings_its_blocks_from_the_disk(
    site: Open, tmp_path: Path
) -> None:
    ids = list(range(100, 100 + TOKENS))
    blocks = 64
    with StoreProcess(tmp_path, "16MiB", "--disk", str(tmp_path), "--disk-size", "16MiB") as node:
        await land(node, blocks, ids)
        assert node.stop() == 0
        node.start()
        await land(node, 0)  # what makes a block

        def announce(engines: list[FakeEngine]) -> None:
            for engine in engines:
                engine.manifest = MANIFEST.digest.hex()

        here, legs = await occupied(site, store=node.url, prepare=announce)
        legs.append(asyncio.create_task(here.post(text(prompt=ids))))
        await waiting(here, 1)
        await asyncio.to_thread(await_stat, node, "disk_promoted_total", blocks)
        assert users(here.prefill[0]) == ["first 0"]
        here.prefill[0].go.set()
        await asyncio.gather(*legs)
