"""The control port of a router: the page, its document, and what else is there."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, text

from kvrouter.control.page.model import Snapshot
from kvrouter.http.failure import Failure

Headers = dict[str, str]


def address(here: Site) -> str:
    assert here.app.ports.control is not None
    return f"http://127.0.0.1:{here.app.ports.control.port}"


async def fetch(here: Site, path: str, **headers: str) -> tuple[int, Headers, bytes]:
    url = address(here) + path
    async with here.http.get(url, headers=headers, allow_redirects=False) as answer:
        fields = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, fields, await answer.read()


async def snapshot(here: Site) -> Snapshot:
    status, _, body = await fetch(here, "/status.json")
    assert status == 200
    return msgspec.json.decode(body, type=Snapshot)


async def once(here: Site, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """The document as soon as it says so; it is made anew a few times a second."""

    async def says_so() -> Snapshot | None:
        told = await snapshot(here)
        return told if condition(told) else None

    told: Snapshot = await until(says_so, look_s=0.05)
    return told


async def test_without_its_port_nobody_looks_at_requests(site: Open) -> None:
    here = await site()
    assert here.app.ports.control is None
    status, _ = await here.get("/status.json")
    assert status == 404


async def test_the_document_knows_engines_load_and_requests(site: Open) -> None:
    here = await site(2, 1, control_port=0)
    for engine in (*here.prefill, *here.decode):
        engine.mode = "held"
    asked = asyncio.create_task(here.post(text(stream=True), **{"x-request-id": "mine"}))
    await asyncio.wait(
        [asyncio.create_task(e.next_began()) for e in here.prefill], return_when="FIRST_COMPLETED"
    )
    told = await snapshot(here)
    assert told.router.state == "ok"
    assert told.router.models == ["m"]
    assert {e["id"]: (e["worker_type"], e["status"], e["circuit"]) for e in told.engines} == {
        **{e.address: ("prefill", "up", "closed") for e in here.prefill},
        here.decode[0].address: ("decode", "up", "closed"),
    }
    assert {e["version"] for e in told.engines} == {"0.32.0"}
    assert sum(e["load"] for e in told.engines) == 1
    (request,) = told.requests.shown
    assert (request.id, request.model, request.phase) == ("mine", "m", "prefill")
    assert request.prefill in {e.address for e in here.prefill}
    assert told.load.running == 1
    for engine in (*here.prefill, *here.decode):
        engine.go.set()
    assert (await asked)[0] == 200
    told = await once(here, lambda told: told.minute.ok == 1)
    assert (told.requests.total, told.load.running) == (0, 0)
    (flow,) = told.flows
    assert (flow.prefill, flow.decode, flow.requests) == (
        request.prefill,
        here.decode[0].address,
        1,
    )
    assert told.minute.ttft_mean_s is not None
    assert told.minute.output_tokens == 4


async def test_tokens_of_a_stream_are_counted_while_it_runs(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    here.decode[0].mode = "hang_mid"
    url = here.url("/v1/completions")
    async with here.http.post(url, json=text(stream=True, max_tokens=9)) as answer:
        await answer.content.readuntil(b"t1")

        await once(
            here,
            lambda told: [(r.phase, r.tokens) for r in told.requests.shown] == [("stream", 2)],
        )
    await once(here, lambda told: told.requests.total == 0)


async def test_an_engine_that_dies_is_away_with_its_problem(site: Open) -> None:
    here = await site(0, 2, control_port=0)
    await here.decode[0].stop()
    await until(lambda: here.app.core.pool.all()[0].identity is None)
    (card, _) = (await once(here, lambda told: told.engines[0]["problem"] is not None)).engines
    assert (card["status"], card["down"], card["circuit"]) == ("away", True, None)
    assert "Connect" in card["problem"]


async def test_while_an_engine_is_down_the_router_is_degraded_and_says_since_when(
    site: Open,
) -> None:
    here = await site(0, 2, control_port=0)
    await here.decode[0].stop()
    told = await once(here, lambda told: told.router.state == "degraded")
    assert told.router.lacking == [f"1 of 2 engines is down: {here.decode[0].address}"]
    event = next(event for event in told.events if event.kind == "left")
    assert (event.engine, abs(told.time_s - event.at_s) < 20) == (here.decode[0].address, True)
    await here.decode[0].start()
    told = await once(here, lambda told: told.router.state == "ok")
    assert (told.events[0].kind, told.router.lacking) == ("joined", [])


async def test_while_every_breaker_is_open_the_router_says_that_nobody_can_serve(
    site: Open,
) -> None:
    here = await site(0, 1, control_port=0)
    pool = here.app.core.pool
    (engine,) = pool.all()
    for _ in range(3):
        pool.failed(engine, Failure.TIMEOUT)
    told = await snapshot(here)
    assert (told.router.state, told.engines[0]["circuit"]) == ("unavailable", "open")
    assert (await here.get("/health"))[0] == 503
    assert told.events[0].kind == "breaker open"


async def test_prompts_and_answers_are_never_in_the_document(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    secret = "a very secret prompt indeed"
    await here.post(text(prompt=secret))
    here.decode[0].mode = "held"
    asked = asyncio.create_task(here.post(text(prompt=secret)))
    await until(lambda: here.app.core.metrics.running == 1)
    _, _, body = await fetch(here, "/status.json")
    assert b"secret" not in body
    here.decode[0].go.set()
    await asked


async def test_the_document_asks_for_the_admin_token_where_there_is_one(site: Open) -> None:
    here = await site(0, 1, control_port=0, admin_token="open sesame")
    refused, headers, _ = await fetch(here, "/status.json")
    assert (refused, headers["www-authenticate"]) == (401, "Bearer")
    wrong, _, _ = await fetch(here, "/status.json", authorization="Bearer open")
    assert wrong == 401
    for scheme in ("Bearer", "bearer", "BEARER"):  # RFC 9110, section 11.1
        right, _, _ = await fetch(here, "/status.json", authorization=f"{scheme} open sesame")
        assert right == 200
    page, _, content = await fetch(here, "/")
    assert page == 200, "the page's files hold nothing of the router"
    assert b"kvrouter" in content


async def test_every_answer_forbids_what_is_not_the_pages_own(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    for path in ("/", "/page.js", "/page.css", "/icon.svg", "/status.json", "/nothing"):
        _, headers, _ = await fetch(here, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "no-referrer", path


async def test_files_of_the_page_are_fetched_once(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    _, headers, _ = await fetch(here, "/page.js")
    status, _, body = await fetch(here, "/page.js", **{"if-none-match": headers["etag"]})
    assert (status, body) == (304, b"")


async def test_what_is_not_there_and_what_is_not_allowed_say_so_in_json(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    for path in ("/nothing", "/../config.py", "/static/page.js", "/%2e%2e/config.py"):
        status, _, body = await fetch(here, path)
        assert status == 404, path
        assert b'"error"' in body
    url = address(here) + "/status.json"
    async with here.http.post(url, json={}) as answer:
        assert answer.status == 405
        assert "error" in await answer.json()


async def test_a_port_that_is_taken_is_said(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    try:
        await site(0, 1, control_port=int(address(here).rpartition(":")[2]))
    except OSError:
        return
    raise AssertionError("two routers on one port")


async def test_the_page_goes_with_its_router(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    url = address(here) + "/status.json"
    async with here.http.get(url) as answer:  # leaves a connection that is kept
        assert answer.status == 200
    await here.app.close()
    failed: Any = None
    try:
        async with aiohttp.ClientSession() as http, http.get(url):
            pass
    except aiohttp.ClientConnectionError as error:
        failed = error
    assert failed is not None
