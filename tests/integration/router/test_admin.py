"""Engines that are added, drained and removed while requests are under way; SIGHUP."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, metric, text

from kvrouter.app.build import build
from kvrouter.app.reload import follow
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Role
from kvrouter.membership.fleet import MAX_ENGINES
from kvrouter.tools.demo.children import Children

JSON = {"content-type": "application/json"}


async def call(
    here: Site, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Json]:
    data = json.dumps(body) if body is not None else None
    fields = {**JSON, **headers} if body is not None else headers
    async with here.http.request(method, here.url(path), data=data, headers=fields) as answer:
        return answer.status, json.loads(await answer.read())


async def add(here: Site, engine: FakeEngine, kind: str) -> tuple[int, Json]:
    url = f"http://{engine.address}"
    return await call(here, "POST", "/workers", {"url": url, "worker_type": kind})


async def test_an_engine_that_is_added_takes_requests(site: Open) -> None:
    here = await site(1, 1, admin=True)
    async with engines(2) as (prefill, decode):
        status, card = await add(here, decode, "decode")
        assert (status, card["status"], card["worker_type"]) == (202, "away", "decode")
        await add(here, prefill, "prefill")
        await until(lambda: len(here.app.core.pool.engines(Role.DECODE)) == 2)
        await until(lambda: len(here.app.core.pool.engines(Role.PREFILL)) == 2)
        for _ in range(4):
            assert (await here.post(text()))[0] == 200
        assert [len(e.requests) for e in (prefill, decode)] == [2, 2]
        _, answer = await call(here, "GET", "/workers")
        assert answer["stats"] == {"prefill_count": 2, "decode_count": 2, "regular_count": 0}
        assert [w["is_healthy"] for w in answer["workers"]] == [True] * 4
        for engine in (prefill, decode):
            assert (await call(here, "DELETE", f"/workers/{engine.address}"))[0] == 200


async def test_an_engine_too_many_is_refused(site: Open) -> None:
    here = await site(1, 1, admin=True)
    for number in range(MAX_ENGINES - 2):
        here.app.core.pool.assign(f"h:{number + 1}", Role.DECODE)
    status, answer = await call(here, "POST", "/workers", {"url": "http://one-more:1"})
    assert (status, answer["error"]["code"]) == (409, 409)
    assert answer["error"]["message"].startswith(f"There are {MAX_ENGINES} workers")
    assert (await call(here, "POST", "/workers", {"url": "http://h:1"}))[0] == 202
    assert await metric(here, "kvrouter:engines_refused_total") == 1


async def test_the_answer_to_an_added_engine_says_where_it_is_found(site: Open) -> None:
    here = await site(0, 0, admin=True)
    async with engines(1) as (engine,):
        body = {"url": f"http://{engine.address}"}
        async with here.http.post(here.url("/workers"), json=body) as answer:
            told, location = await answer.json(), answer.headers["location"]
        assert location == f"/workers/{told['worker_id']}"
        status, card = await call(here, "GET", location)
        assert (status, card["url"]) == (200, body["url"])
        status, card = await call(here, "DELETE", location)
        assert (status, card["worker_id"]) == (200, told["worker_id"])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_that_drains_ends_its_legs_and_gets_no_new_ones(
    site: Open, leg: str
) -> None:
    here = await site(2, 2, admin=True)
    leaving, staying = here.prefill if leg == "prefill" else here.decode
    leaving.mode = "held"
    first = asyncio.create_task(here.post(text(user="first")))
    await leaving.next_began()
    status, card = await call(here, "DELETE", f"/workers/{leaving.address}")
    assert (status, card["status"], card["load"], card["removed"]) == (202, "draining", 1, False)
    for _ in range(4):
        assert (await here.post(text()))[0] == 200
    assert len(staying.requests) == 4
    _, card = await call(here, "GET", f"/workers/{leaving.address}")
    assert card["status"] == "draining"
    leaving.go.set()
    assert (await first)[0] == 200
    assert [r["user"] for r in leaving.requests] == ["first"]
    assert (await call(here, "GET", f"/workers/{leaving.address}"))[0] == 404
    await forgotten(here, leaving)


async def forgotten(here: Site, engine: FakeEngine) -> None:
    """Nothing in the router names the engine any more."""
    _, page = await here.get("/metrics")
    assert engine.address.encode() not in page
    assert all(e.address != engine.address for e in here.app.core.pool.all())
    await until(lambda: engine.open_connections == 0)


async def cut(here: Site, engine: FakeEngine) -> Json:
    """Remove an engine by force."""
    status, card = await call(here, "DELETE", f"/workers/{engine.address}?force=true")
    assert (status, card["removed"]) == (200, True)
    assert (await call(here, "GET", f"/workers/{engine.address}"))[0] == 404
    return card


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "you", "there"]])
async def test_a_stream_on_an_engine_that_is_removed_by_force_ends_with_an_error(
    site: Open, prompt: Any
) -> None:
    here = await site(1, 1, admin=True)
    engine = here.decode[0]
    engine.mode = "hang_mid"
    body = text(prompt=prompt, stream=True)
    async with here.http.post(here.url("/v1/completions"), json=body) as answer:
        await answer.content.readuntil(b" t1")
        assert (await cut(here, engine))["cut"] == (3 if isinstance(prompt, list) else 1)
        rest = await answer.content.read()
    *_, error, done, last = rest.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
    assert (done, last) == (b"data: [DONE]", b"")
    await engine.next_left()
    await forgotten(here, engine)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_has_seen_goes_to_another_engine_when_one_is_removed_by_force(
    site: Open, leg: str, stream: bool
) -> None:
    here = await site(2, 2, admin=True)
    leaving = (here.prefill if leg == "prefill" else here.decode)[0]
    leaving.mode = "hang"
    task = asyncio.create_task(here.post(text(stream=stream)))
    await leaving.next_began()
    assert (await cut(here, leaving))["cut"] == 1
    status, _, body = await task
    assert status == 200
    assert b" t3" in body
    assert b'"error"' not in body
    await leaving.next_left()
    await forgotten(here, leaving)


@pytest.mark.parametrize("first", ["drains", "is away"])
async def test_an_engine_that_leaves_already_can_be_removed_by_force(
    site: Open, first: str
) -> None:
    here = await site(1, 2, admin=True)
    leaving = here.decode[0]
    leaving.mode = "hang_mid"
    task = asyncio.create_task(here.post(text(stream=True)))
    await leaving.next_began()
    if first == "drains":
        await call(here, "DELETE", f"/workers/{leaving.address}")
    else:
        leaving.key = "another"  # its checks answer 401 from now on
        await until(lambda: len(here.app.core.pool.engines(Role.DECODE)) == 1)
    _, card = await call(here, "GET", f"/workers/{leaving.address}")
    assert (card["status"], card["load"]) == ("draining" if first == "drains" else "away", 1)
    assert (await cut(here, leaving))["cut"] == 1
    assert (await task)[2].endswith(b"data: [DONE]\n\n")
    await forgotten(here, leaving)


async def test_an_engine_removed_by_force_can_be_added_again_at_once(site: Open) -> None:
    here = await site(1, 1, admin=True)
    engine = here.decode[0]
    engine.mode = "hang"
    task = asyncio.create_task(here.post(text()))
    await engine.next_began()
    await cut(here, engine)
    engine.mode = "ok"
    assert (await add(here, engine, "decode"))[0] == 202
    assert (await task)[0] == 503
    await until(lambda: len(here.app.core.pool.engines(Role.DECODE)) == 1)
    assert (await here.post(text()))[0] == 200


async def test_force_is_true_or_false(site: Open) -> None:
    here = await site(admin=True)
    path = f"/workers/{here.decode[0].address}"
    status, answer = await call(here, "DELETE", f"{path}?force=now")
    assert (status, answer["error"]["param"]) == (400, "force")
    assert (await call(here, "GET", path))[0] == 200
    status, card = await call(here, "DELETE", f"{path}?force=false")
    assert (status, card["removed"]) == (200, True)


@pytest.mark.parametrize("admin", [False, True])
async def test_the_document_tells_of_the_admin_api_where_it_is_served(
    site: Open, admin: bool
) -> None:
    here = await site(admin=admin)
    _, document = await call(here, "GET", "/openapi.json")
    paths = {path for path in document["paths"] if path.startswith("/workers")}
    assert paths == ({"/workers", "/workers/{worker}"} if admin else set())
    for path in paths:
        for method in document["paths"][path]:
            status, _ = await call(here, method.upper(), path)
            assert str(status) in document["paths"][path][method]["responses"]


async def test_what_an_engine_held_is_forgotten_with_it(site: Open) -> None:
    here = await site(1, 2, admin=True, policy="prefix", store="kv://127.0.0.1:1")
    for engine in here.decode:
        engine.manifest = "ab" * 32
    await restarted(here)
    prompt = list(range(64))
    for _ in range(4):
        assert (await here.post(text(prompt=prompt)))[0] == 200
    await until(lambda: len(here.app.core.index) > 0)
    for engine in (*here.decode, *here.prefill):
        await call(here, "DELETE", f"/workers/{engine.address}")
    await until(lambda: len(here.app.core.index) == 0)
    assert here.app.core.pool.all() == ()


async def restarted(here: Site) -> None:
    """Every decode engine was away for a moment, and was asked anew who it is."""
    for engine in here.decode:
        joins = [e.joins for e in here.app.core.pool.all() if e.address == engine.address]
        await engine.stop()
        known = here.app.core.pool.find(engine.address)
        await until(lambda known=known: known is not None and known.identity is None)
        await engine.start()
        await until(lambda known=known, joins=joins: known.joins > joins[0])


async def test_a_worker_is_named_by_its_url_too(site: Open) -> None:
    here = await site(admin=True)
    address = here.decode[0].address
    for name in (f"http://{address}", f"http%3A%2F%2F{address.replace(':', '%3A')}", address):
        status, card = await call(here, "GET", f"/workers/{name}")
        assert (status, card["id"], card["url"]) == (200, address, f"http://{address}")


@pytest.mark.parametrize(
    "body",
    [{}, [], {"url": 7}, {"url": "ftp://a:1"}, {"url": "a:1", "worker_type": "x"}, {"uri": "a:1"}],
)
async def test_what_is_wrong_is_said(site: Open, body: Any) -> None:
    here = await site(admin=True)
    status, answer = await call(here, "POST", "/workers", body)
    assert status == 400
    assert answer["error"]["message"]
    assert len(here.app.core.pool.all()) == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"url": "\xff"}',
        b'{"url": "\\ud800"}',
        b'{"url": ' + b"9" * 5000 + b"}",
        b'{"url": "a:' + b"9" * 5000 + b'"}',
        b'{"url": "a:1", "more": 1e999}',
        b'{"url": "a:1", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["bytes", "surrogate", "number", "port", "infinite", "deep"],
)
async def test_a_body_that_cannot_be_read_is_a_400(site: Open, body: bytes) -> None:
    here = await site(admin=True)
    status, _, answer = await here.post(body, "/workers", **{"content-type": "application/json"})
    assert status == 400, answer
    assert json.loads(answer)["error"]["message"]


async def test_a_page_in_a_browser_cannot_add_engines(site: Open) -> None:
    here = await site(admin=True)
    body = {"url": "127.0.0.1:1", "worker_type": "decode"}
    status, _ = await call(here, "POST", "/workers", body, **{"content-type": "text/plain"})
    assert status == 415
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil"}):
        status, answer = await call(here, "POST", "/workers", body, **headers)
        assert (status, answer["error"]["code"]) == (403, 403)
        status, _ = await call(
            here, "DELETE", f"/workers/{here.decode[0].address}?force=true", **headers
        )
        assert status == 403
    assert len(here.app.core.pool.all()) == 2


async def test_who_has_no_token_is_turned_away(site: Open) -> None:
    here = await site(admin=True, admin_token="secret")
    calls = (("GET", ""), ("POST", ""), ("GET", f"/{here.decode[0].address}"))
    for method, path in (*calls, ("DELETE", f"/{here.decode[0].address}")):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            status, answer = await call(here, method, f"/workers{path}", **headers)
            assert (status, answer["error"]["type"]) == (401, "AuthenticationError")
    status, _ = await call(here, "GET", "/workers", authorization="Bearer secret")
    assert status == 200
    assert len(here.app.core.pool.all()) == 2


async def test_without_the_flag_there_is_no_such_page(site: Open) -> None:
    here = await site()
    assert (await call(here, "GET", "/workers"))[0] == 404


def test_an_open_admin_api_is_not_served_to_others() -> None:
    with pytest.raises(ValueError, match="--admin-token"):
        RouterSettings(admin=True, host="0.0.0.0")
    assert RouterSettings(admin=True, host="0.0.0.0", admin_token=SecretStr("t")).admin
    assert RouterSettings(admin=True).decode == []


async def test_a_router_can_begin_without_engines(site: Open) -> None:
    here = await site(0, 0, admin=True, engine_wait_s=30)
    task = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    async with engines(1) as (engine,):
        await add(here, engine, "regular")
        assert (await task)[0] == 200
        await call(here, "DELETE", f"/workers/{engine.address}")


async def test_settings_read_again_change_the_engines_and_nothing_else(site: Open) -> None:
    here = await site(1, 1)
    settings = here.app.settings
    async with engines(1) as (fresh,):
        wanted = {"decode": [fresh.address], "prefill": [here.prefill[0].address]}
        follow(here.app, settings.model_copy(update={**wanted, "request_timeout_s": 1.0}))
        await until(lambda: len(here.app.core.pool.engines(Role.DECODE)) == 1)
        assert (await here.post(text()))[0] == 200
        assert len(fresh.requests) == 1
        assert here.app.core.pool.find(here.decode[0].address) is None


async def test_sighup_reads_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    async with engines(2) as made, Children(tmp_path) as children, aiohttp.ClientSession() as http:
        file.write_text(f"decode: [{made[0].address}]\nadmin: true\n")
        router = await children.start("router", "serve", "--port", "0", "--config", str(file))

        async def workers(*wanted: FakeEngine) -> None:
            addresses = {engine.address for engine in wanted}

            async def are_up() -> bool:
                async with http.get(f"{router.http}/workers") as answer:
                    cards = (await answer.json())["workers"]
                return {c["id"] for c in cards if c["status"] == "up"} == addresses

            await until(are_up, look_s=0.02)

        await workers(made[0])
        file.write_text(f"decode: [{made[1].address}]\nadmin: true\n")
        os.kill(router.pid, signal.SIGHUP)
        await workers(made[1])
        file.write_text("decode: [\n")
        os.kill(router.pid, signal.SIGHUP)
        file.write_text(f"decode: [{made[0].address}, {made[1].address}]\nadmin: true\n")
        os.kill(router.pid, signal.SIGHUP)
        await workers(*made)
        router.process.terminate()
        assert await router.process.wait() == 0
        assert "nanobind" not in children.log_tail(router)


async def test_health_waits_until_every_engine_was_asked(site: Open) -> None:
    here = await site()
    here.decode[0].mode = "ok"
    settings = here.app.settings.model_copy(update={"port": 0})
    slow = FakeEngine()
    slow.healthy.clear()
    await slow.start()
    app = build(settings.model_copy(update={"decode": [*settings.decode, slow.address]}))
    starting = asyncio.create_task(app.start())
    await until(lambda: app.core.pool.engines(Role.DECODE))
    here.port = app.ports.public.port
    status, body = await here.get("/health")
    assert (status, json.loads(body)["status"]) == (503, "starting")
    slow.healthy.set()
    await starting
    assert (await here.get("/health"))[0] == 200
    await app.close()
    await slow.stop()


async def test_series_of_a_removed_engine_are_gone(site: Open) -> None:
    here = await site(1, 2, admin=True)
    for _ in range(2):
        assert (await here.post(text()))[0] == 200
    gone = here.decode[0]
    assert await metric(here, f'kvrouter:worker_up{{engine="{gone.address}"') == 1
    await call(here, "DELETE", f"/workers/{gone.address}")
    await forgotten(here, gone)
