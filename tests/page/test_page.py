"""The page in a real browser, before a real router, simulated engines and a store under load."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.page.browser import Tab
from tests.page.cluster import MODEL, Cluster, ask, cluster, load

pytestmark = [pytest.mark.page, pytest.mark.asyncio(loop_scope="module")]
SCRIPTS = Path(__file__).resolve().parent
FILLED = "document.querySelectorAll('#request-rows tr:not(.free)').length > 1"
LOOKS = [(1280, 800, "dark"), (1440, 900, "light"), (390, 844, "dark"), (360, 780, "light")]
BY_LOOK = pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look[0]} px, {look[2]}")
NONE = "\u2013"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill and two decode engines, a store and a router, under load, for all tests."""
    folder = tmp_path_factory.mktemp("cluster")
    async with cluster(folder) as running, load(running.router.http, 6):
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def frail(tmp_path: Path) -> AsyncIterator[Cluster]:
    """The same, for one test to break."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    async with cluster(folder) as running, load(running.router.http, 4):
        yield running


def script(name: str) -> str:
    """An expression that looks at the page."""
    return (SCRIPTS / f"{name}.js").read_text()


async def watch(tab: Tab, here: Cluster, *look: Any) -> None:
    """Open the page, and wait until it shows something in every section."""
    width, height, scheme = look or (1440, 900, "dark")
    await tab.look(width, height, scheme=scheme)
    await tab.go(here.page)
    await tab.until(FILLED)


@BY_LOOK
async def test_every_section_is_filled_and_everything_fits_and_can_be_read(
    here: Cluster, tab: Tab, look: tuple[int, int, str]
) -> None:
    await watch(tab, here, *look)
    assert await tab.text("#state") == "serving"
    await tab.until("document.querySelectorAll('.ribbon').length > 1")
    await tab.until("document.querySelectorAll('#store .tier').length === 1")
    for name in here.engines:
        assert here.address(name) in await tab.text("#engine-rows")
    ids = await tab.run("[...document.querySelectorAll('#engine-rows .id')].map(e => e.innerText)")
    assert ids == list(here.engines)
    values = "[...document.querySelectorAll('.value')].map(e => e.innerText)"
    await tab.until(f"{values}.every(text => text && text !== '{NONE}')")
    assert MODEL in await tab.text("#about")
    assert await tab.run("document.documentElement.scrollWidth") <= look[0]
    assert await tab.run(script("clipped")) == []
    assert await tab.run(script("contrast")) == []


async def test_requests_that_fail_are_counted(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    body = {"model": "no-such-model", "prompt": [1, 2, 3]}
    async with aiohttp.ClientSession() as http:
        assert await ask(http, here.router.http, body) == 404
    await tab.until("/[1-9] failed/.test(document.getElementById('tiles').innerText)")


async def test_a_large_fleet_is_grouped_by_model_and_shows_the_worst_of_each_group(
    here: Cluster, tab: Tab
) -> None:
    await watch(tab, here)
    answer = await tab.run("fetch('status.json').then(a => a.json())")
    some = answer["engines"][0]
    answer["engines"] = [
        {
            **some,
            "id": f"{role}:{n}",
            "label": None,
            "worker_type": role,
            "models": [f"model-{n % 2}"],
        }
        for role in ("prefill", "decode")
        for n in range(32)
    ]
    answer["engines"][4] |= {"status": "away", "circuit": None, "down": True}
    answer["flows"] = [
        {"prefill": f"prefill:{n}", "decode": f"decode:{m}", "requests": 1, "tokens": 10}
        for n in range(32)
        for m in range(n % 2, 32, 2)
    ]
    await tab.run(f"window.fetch = async () => new Response({json.dumps(json.dumps(answer))})")
    await tab.until("document.querySelectorAll('#engine-rows tr').length === 64")
    nodes = await tab.run("[...document.querySelectorAll('.node')].map(e => e.textContent)")
    assert len(nodes) == 4
    assert await tab.run("document.querySelectorAll('.node.away').length") == 1
    assert "1 of 16 down" in next(node for node in nodes if "down" in node)
    assert await tab.run("document.querySelectorAll('.ribbon').length") == 2
    flow = "[...document.querySelector('#flow-rows tr').cells].map(e => e.textContent)"
    assert await tab.run(flow) == ["model-0", "model-0", "256", "2.56\u2009k"]
    first = await tab.text("#engine-rows tr")
    assert "prefill:4" in first, "the worst comes first"
    assert await tab.run("document.getElementById('engines-box').tabIndex") == 0


async def test_nothing_is_loaded_from_elsewhere(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    assert {url.rsplit("/", 1)[0] for url in tab.requests} == {here.page}


async def test_nothing_jumps_while_it_updates(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    before = await tab.run(script("layout"))
    asked = "performance.getEntriesByName(new URL('status.json', location).href).length"
    before_s = await tab.run(asked)
    await tab.until(f"{asked} >= {before_s} + 5")
    assert await tab.run(script("layout")) == before
    assert await tab.run(script("shifts")) < 0.001


async def test_an_engine_that_is_killed_is_seen_and_so_is_a_router_that_is_gone(
    frail: Cluster, tab: Tab
) -> None:
    here = frail
    await watch(tab, here)
    await here.children.kill(here.engines["prefill-0"])
    await tab.until("document.querySelector('#engine-rows tr.away')")
    row = await tab.text("#engine-rows tr.away")
    assert here.address("prefill-0") in row
    assert "down" in row
    await tab.until("document.querySelector('#engine-rows tr.away .more.problem')")
    assert await tab.run("document.querySelectorAll('.node.away').length") == 1
    assert "3 of 4 up, 1 down" in await tab.text("#engines-hint")
    assert "1 down" in await tab.text("#tiles")
    assert await tab.text("#state") == "degraded: 1 engine down"
    assert (await tab.run("document.title")).startswith("degraded: 1 engine down")
    assert "1 of 4 engines is down: prefill-0 since " in await tab.text("#lacking")
    newest = (await tab.text("#event-rows li")).split()
    assert newest[1:3] == ["left", "prefill-0"]
    assert await tab.run(script("clipped")) == []
    assert await tab.run(script("contrast")) == []
    for name in ("decode-0", "decode-1"):
        await here.children.kill(here.engines[name])
    await tab.until("document.getElementById('state').innerText === 'down: nobody can serve'")
    assert await tab.run("document.querySelector('#lacking.unavailable').checkVisibility()")
    await here.children.kill(here.router)
    await tab.until("!document.getElementById('lost').hidden")
    assert "does not answer" in await tab.text("#lost")
    assert await tab.text("#state") == "no answer"
    assert here.address("decode-0") in await tab.text("#engine-rows")
    refused = [c for c in tab.complaints if "ERR_CONNECTION_REFUSED" in c]
    assert tab.complaints == refused, "a browser says of its own which fetch failed"
    tab.complaints.clear()


async def test_names_that_are_html_are_shown_as_they_are(here: Cluster, tab: Tab) -> None:
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    await watch(tab, here)
    answer = await tab.run("fetch('status.json').then(a => a.json())")
    answer["router"]["models"] = [evil]
    answer["router"]["lacking"] = [evil]
    rank = {"id": evil, "circuit": "open", "load": 1, "tokens": 5, "index": evil}
    told = {"id": evil, "problem": evil, "models": [evil], "version": evil, "ranks": [rank]}
    told = {**told, "label": evil}
    event = {"key": 1, "at_s": 1, "kind": evil, "engine": evil, "label": evil, "text": evil}
    answer["events"] = [event]
    answer["engines"] = [{**answer["engines"][0], **told}]
    answer["flows"] = [{"prefill": evil, "decode": evil, "requests": 1, "tokens": 1}]
    request = {"key": 1, "id": evil, "model": evil, "phase": "plan", "prefill": evil}
    more = {"decode": evil, "age_s": 1, "prompt_tokens": 1, "tokens": 1}
    answer["requests"] = {"total": 1, "shown": [{**request, **more}]}
    answer["stores"][0]["problem"] = evil
    await tab.run(f"window.fetch = async () => new Response({json.dumps(json.dumps(answer))})")
    await tab.until("document.getElementById('about').innerText.includes('<img')")
    rows = [f"#{what}-rows" for what in ("engine", "request", "flow", "event")]
    for place in (*rows, "#store-hint", "#lacking"):
        shown = await tab.run(f"document.querySelector('{place}').textContent")
        assert evil in shown, place
    assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in await tab.run("document.title")


async def test_every_node_of_the_store_is_shown(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    answer = await tab.run("fetch('status.json').then(a => a.json())")
    other = {**answer["stores"][0], "url": "kv://10.0.0.2:7400"}
    for away in (False, True):
        answer["stores"] = [answer["stores"][0], {**other, "connected": not away}]
        await tab.run(f"window.fetch = async () => new Response({json.dumps(json.dumps(answer))})")
        hint = "kv://10.0.0.2:7400 is not connected" if away else "2 nodes"
        await tab.until(f"document.getElementById('store-hint').textContent === '{hint}'")
    assert await tab.run("document.querySelectorAll('#store .tier').length") == 2
    assert "kv://10.0.0.2:7400" in await tab.text("#store")


async def test_a_router_with_a_token_is_asked_with_the_one_that_is_typed(
    here: Cluster, tab: Tab
) -> None:
    await watch(tab, here)
    await tab.run(
        "{ const plain = window.fetch; window.fetch = (url, how) => how.headers.authorization === "
        "'Bearer sesame' ? plain(url) : Promise.resolve(new Response('{}', {status: 401})); }"
    )
    await tab.until("!document.getElementById('unlock').hidden")
    assert await tab.run("document.activeElement.id") == "token"
    for typed in ("wrong", "sesame"):
        await tab.run(f"document.getElementById('token').value = '{typed}'")
        await tab.press("Enter")
        if typed == "wrong":
            await tab.until("document.getElementById('unlock-wrong').innerText")
    await tab.until("document.getElementById('unlock').hidden")
    await tab.until(FILLED)


async def test_ids_that_clients_choose_come_as_text(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    body = {"model": MODEL, "prompt": [5] * 2000, "max_tokens": 400, "stream": True}
    name = "a:b=/@+.." + "x" * 100
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(http, here.router.http, body, **{"x-request-id": name}))
        await tab.until(f"document.getElementById('request-rows').textContent.includes('{name}')")
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


async def test_it_can_be_used_with_the_keyboard_alone(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    stops = []
    for _ in range(6):
        await tab.press("Tab")
        active = "document.activeElement"
        stops.append(await tab.run(f"{active}.id || {active}.className || {active}.tagName"))
        assert await tab.run(f"getComputedStyle({active}).outlineStyle") != "none", stops
    assert stops[:2] == ["skip", "theme"]
    assert "SUMMARY" in stops
    assert "scroll" in stops


async def test_colours_can_be_chosen_and_are_kept(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = await tab.run(ground)
    await tab.run("document.getElementById('theme').click()")
    light = await tab.run(ground)
    assert light != dark
    await tab.go(here.page)
    await tab.until(FILLED)
    assert await tab.run(ground) == light
    assert await tab.text("#theme-name") == "light"
    assert "light" in await tab.run("document.getElementById('theme').ariaLabel")


async def test_readers_of_the_screen_get_names_and_tables(here: Cluster, tab: Tab) -> None:
    await watch(tab, here)
    tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    said = {(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if "role" in n}
    for heading in ("kvrouter", "Flow between the pools", "Engines", "Requests under way"):
        assert ("heading", heading) in said, heading
    assert ("table", "Engines with their load and state") in said
    assert any(role == "status" for role, _ in said)
    unnamed = [role for role, name in said if role in ("button", "link", "image") and not name]
    assert unnamed == []
