"""Requests that wait: for others to end, and for a decode engine to come."""

import asyncio
import json

import aiohttp
import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, metric, text

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Role

ONE = {"max_concurrent_requests": 1}


async def occupied(site: Open, **settings: object) -> tuple[Site, "asyncio.Task[object]"]:
    """A site whose one place a request has taken that waits for its prefill leg."""
    here = await site(**{**ONE, **settings})
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text(user="first")))
    await here.prefill[0].next_began()
    return here, task


async def waiting(here: Site, count: int) -> None:
    await until(lambda: here.app.core.queue_wait.waiting == count)


async def test_requests_beyond_the_limit_wait_and_are_served(site: Open) -> None:
    here, first = await occupied(site)
    more = [asyncio.create_task(here.post(text())) for _ in range(3)]
    await waiting(here, 3)
    assert await metric(here, "kvrouter:num_requests_waiting ") == 3
    assert await metric(here, 'kvrouter:num_requests_waiting_by_reason{reason="capacity"}') == 3
    assert await metric(here, "kvrouter:num_requests_running ") == 1
    assert len(here.prefill[0].requests) == 1
    here.prefill[0].go.set()
    await first
    assert [(await task)[0] for task in more] == [200] * 3
    assert await metric(here, "kvrouter:request_queue_time_seconds_count") == 3
    assert await metric(here, "kvrouter:num_requests_waiting ") == 0


async def test_a_lower_priority_is_served_first(site: Open) -> None:
    here, first = await occupied(site)
    tasks = []
    for count, (user, priority) in enumerate([("late", 1), ("soon", -1), ("mid", 0)], 1):
        tasks.append(asyncio.create_task(here.post(text(user=user, priority=priority))))
        await waiting(here, count)
    here.prefill[0].go.set()
    await asyncio.gather(first, *tasks)
    assert [r["user"] for r in here.decode[0].requests] == ["first", "soon", "mid", "late"]


@pytest.mark.parametrize("header", ["x-tenant", "X-Forwarded-For"])
async def test_a_tenant_that_floods_does_not_keep_another_out(site: Open, header: str) -> None:
    proxied = {"trusted_proxies": ["127.0.0.1"], "tenant_header": header}
    here, first = await occupied(site, queue_size=2, **proxied)
    floods = ({header: "10.0.0.1"}, {header: "10.0.0.1"})
    flood = [asyncio.create_task(here.post(text(user="a"), **each)) for each in floods]
    await waiting(here, 2)
    other = asyncio.create_task(here.post(text(user="b"), **{header: "10.0.0.2"}))
    done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[0] for task in done] == [429]
    here.prefill[0].go.set()
    await first
    assert (await other)[0] == 200
    assert sorted([(await task)[0] for task in flood]) == [200, 429]


async def test_a_client_gets_no_places_by_the_names_that_it_gives_itself(site: Open) -> None:
    here, first = await occupied(site, queue_size=3, tenant_header="X-Tenant")

    def asking(name: str, host: str) -> "asyncio.Task[int]":
        headers = {"authorization": name, "x-tenant": name, "x-forwarded-for": name}
        return asyncio.create_task(ask_from(here, host, headers))

    liars = [asking(f"10.0.0.{number}", "127.0.0.2") for number in range(3)]
    await waiting(here, 3)
    honest = asking("10.0.0.1", "127.0.0.3")
    done, liars_left = await asyncio.wait(liars, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [429]
    assert await asking("10.0.0.9", "127.0.0.2") == 429
    here.prefill[0].go.set()
    await first
    assert await honest == 200
    assert [await task for task in liars_left] == [200, 200]


async def ask_from(here: Site, host: str, headers: dict[str, str]) -> int:
    """The status of a completion that is asked for from that address of this machine."""
    connector = aiohttp.TCPConnector(local_addr=(host, 0))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(here.url("/v1/completions"), json=text(), headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def test_a_full_queue_is_a_429_and_a_turn_that_does_not_come_a_503(site: Open) -> None:
    here, first = await occupied(site, queue_size=1, queue_timeout_s=0.3)
    late = asyncio.create_task(here.post(text()))
    await waiting(here, 1)
    for task, status in ((here.post(text()), 429), (late, 503)):
        got, headers, body = await task
        assert (got, headers["retry-after"]) == (status, "1")
        assert json.loads(body)["error"]["code"] == status
    here.prefill[0].go.set()
    await first
    assert here.app.core.queue_wait.waiting == 0
    assert len(here.decode[0].requests) == 1


@pytest.mark.parametrize("bad", [{"prompt": None}, {"priority": "high"}, {"n": "x"}])
async def test_what_is_wrong_is_refused_without_waiting(site: Open, bad: dict[str, object]) -> None:
    here, first = await occupied(site)
    assert (await here.post(text(**bad)))[0] == 400
    here.prefill[0].go.set()
    await first


async def test_a_client_that_leaves_the_queue_costs_nothing(site: Open) -> None:
    here, first = await occupied(site)
    tasks = [asyncio.create_task(here.post(text())) for _ in range(5)]
    await waiting(here, 5)
    for task in tasks:
        task.cancel()
    await waiting(here, 0)
    here.prefill[0].go.set()
    await first
    assert len(here.prefill[0].requests) == 1
    assert (await here.post(text()))[0] == 200


async def test_a_request_waits_for_a_decode_engine_that_restarts(site: Open) -> None:
    here = await site(engine_wait_s=30)
    await here.decode[0].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE))
    task = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    assert await metric(here, 'kvrouter:num_requests_waiting_by_reason{reason="engine"}') == 1
    await here.decode[0].start()
    assert (await task)[0] == 200


async def test_a_request_whose_only_engine_dies_under_it_waits_for_its_return(site: Open) -> None:
    here = await site(engine_wait_s=30)
    here.decode[0].mode = "held"
    task = asyncio.create_task(here.post(text()))
    await here.decode[0].next_began()
    await here.decode[0].stop()
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    here.decode[0].mode = "ok"
    await here.decode[0].start()
    assert (await task)[0] == 200


async def test_no_more_wait_for_an_engine_than_the_queue_has_places(site: Open) -> None:
    here = await site(engine_wait_s=30, queue_size=1)
    await here.decode[0].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE))
    task = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    status, headers, _ = await here.post(text())
    assert (status, headers["retry-after"]) == (503, "1")
    task.cancel()
    await until(lambda: here.app.core.engine_wait.waiting == 0)


async def test_an_engine_that_does_not_come_is_a_503(site: Open) -> None:
    here = await site(engine_wait_s=0.2)
    await here.decode[0].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE))
    assert (await here.post(text()))[0] == 503


async def test_a_router_that_starts_before_its_engines_lets_requests_wait(site: Open) -> None:
    here = await site()
    late = FakeEngine()
    await late.start()
    await late.stop()
    settings = RouterSettings(decode=[late.address], port=0, health_interval_s=0.05)
    app = build(settings)
    here.port = await app.start()
    task = asyncio.create_task(here.post(text()))
    await until(lambda: app.core.engine_wait.waiting == 1)
    await late.start()
    assert (await task)[0] == 200
    await app.close()
    await late.stop()
