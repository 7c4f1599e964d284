"""Keys of callers and of engines: who is let in, to what, and how far a key goes."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tests.fakes.engine import FakeEngine, engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, chat, metric, text
from tests.integration.router.test_passthrough import POSTED, offer, saying, streaming

from kvrouter.app.reload import follow
from kvrouter.credentials.caller_keys import file_line, new_key
from kvrouter.credentials.engine_keys import WorkerKeys
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.telemetry.request_log import RequestLog

GUARDED = ["/v1/completions", "/v1/chat/completions", *POSTED]
OPEN = ["/health", "/ready", "/ping", "/live", "/version", "/metrics", "/openapi.json"]


class Keys:
    """A file of keys, and the keys."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.of: dict[str, str] = {}

    def write(self, **limits: str) -> str:
        """Names with what stands behind their hash in the file."""
        lines = []
        for name, more in limits.items():
            key = self.of.setdefault(name, new_key())
            _, _, hashed = file_line(name, key).partition(": ")
            lines.append(f"{name}: {{key: '{hashed}'{', ' if more else ''}{more}}}")
        self.path.write_text("\n".join(lines))
        return str(self.path)

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.of[name]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


async def test_a_form_names_a_model_to_which_its_key_has_a_right(site: Open, keys: Keys) -> None:
    def listing(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.endpoints = ("/v1/completions", "/v1/audio/transcriptions")

    file = keys.write(some="models: [m]", none="models: [x]")
    here = await site(api_key_file=file, prepare=listing)
    offer(here.decode, saying(200, {}), "/v1/audio/transcriptions")
    for name, status in (("some", 200), ("none", 404)):
        form = aiohttp.FormData({"model": "m"}, default_to_multipart=True)
        url, key = here.url("/v1/audio/transcriptions"), keys.bearer(name)
        async with here.http.post(url, data=form, headers=key) as answer:
            assert answer.status == status


@pytest.mark.parametrize(
    ("path", "without_key"), [("/v1/models/", 401), ("/v1/completions/", 401), ("/health/", 200)]
)
async def test_a_slash_at_the_end_of_a_path_opens_nothing_and_closes_nothing(
    site: Open, keys: Keys, path: str, without_key: int
) -> None:
    here = await site(api_key_file=keys.write(research=""))
    for headers, status in (({}, without_key), (keys.bearer("research"), 200)):
        method = "POST" if "completions" in path else "GET"
        url = here.url(path)
        async with here.http.request(method, url, json=text(), headers=headers) as answer:
            assert answer.status == status


async def test_an_anthropic_client_shows_its_key_in_its_own_header(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(research=""))
    offer(here.decode, saying(200, {"answer": 1}))
    for key, status in ((keys.of["research"], 200), ("no", 401)):
        assert (await here.post(chat(), "/v1/messages", **{"x-api-key": key}))[0] == status
    assert "authorization" not in here.decode[0].posted_headers[0]


async def test_without_keys_of_the_router_an_anthropic_clients_key_is_the_engines(
    site: Open,
) -> None:
    here = await site()
    offer(here.decode, saying(200, {"answer": 1}))
    assert (await here.post(chat(), "/v1/messages", **{"x-api-key": "k"}))[0] == 200
    assert here.decode[0].posted_headers[0]["authorization"] == "Bearer k"


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


async def test_a_good_key_is_served_and_another_is_refused(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(research=""))
    offer(here.decode, saying(200, {"answer": 1}))
    for path in GUARDED:
        body = {**text(), **chat(), "input": "a"}
        assert (await here.post(body, path, **keys.bearer("research")))[0] == 200
        for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": keys.of["research"]}):
            status, headers, answer = await here.post(body, path, **wrong)
            assert status == 401
            assert headers["www-authenticate"] == "Bearer"
            assert headers["x-request-id"]
            error = error_of(answer)
            assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
    asked = len(GUARDED)
    assert len(here.decode[0].requests) + len(here.decode[0].posted) == asked
    assert await metric(here, 'kvrouter:request_errors_total{code="401",') == 3 * asked
    row = 'kvrouter:key_refused_total{key="",reason="unknown"}'
    assert await metric(here, row) == 3 * asked


async def test_what_says_how_the_router_fares_is_open_and_all_else_is_not(
    site: Open, keys: Keys
) -> None:
    here = await site(api_key_file=keys.write(research=""))
    for path in OPEN:
        assert (await here.get(path))[0] == 200
    for path in ("/v1/models", "/v1/models/m", "/nothing", "/healthx", "//health"):
        assert (await here.get(path))[0] == 401
    head = await here.http.head(here.url("/v1/models"))
    assert head.status == 401


async def test_keys_of_flags_are_good_too(site: Open) -> None:
    here = await site(api_key=["one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401)):
        assert (await here.post(text(), authorization=f"Bearer {key}"))[0] == status


async def test_openai_raises_what_it_raises_for_its_own_server(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(a="models: [other], requests_per_s: 0.001"))
    url = here.url("/v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="m", prompt="a")
    async with openai.AsyncOpenAI(base_url=url, api_key=keys.of["a"], max_retries=0) as client:
        assert (await client.models.list()).data == []
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="m", prompt="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="m", prompt="a")
        assert limited.value.code == "rate_limit_exceeded"
        assert int(limited.value.response.headers["retry-after"]) > 900


@pytest.mark.parametrize("path", GUARDED)
async def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(
    site: Open, keys: Keys, path: str
) -> None:
    here = await site(api_key_file=keys.write(all="", some="models: [m]", none="models: [x]"))
    offer(here.decode, saying(200, {"answer": 1}))
    body = {**text(), **chat(), "input": "a"}
    for name, status in (("all", 200), ("some", 200), ("none", 404)):
        assert (await here.post(body, path, **keys.bearer(name)))[0] == status
    unknown = await here.post({**body, "model": "zz"}, path, **keys.bearer("some"))
    hidden = await here.post(body, path, **keys.bearer("none"))
    assert hidden[0] == unknown[0] == 404
    assert b"does not exist" in hidden[2]
    assert hidden[2].replace(b"`m`", b"`zz`") == unknown[2]


async def test_a_key_sees_the_models_that_it_may_use(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(some="models: [m]", none="models: [x]"))
    for name, models in (("some", ["m"]), ("none", [])):
        headers = keys.bearer(name)
        async with here.http.get(here.url("/v1/models"), headers=headers) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == models
        async with here.http.get(here.url("/v1/models/m"), headers=headers) as answer:
            assert answer.status == (200 if models else 404)


async def test_requests_at_a_time_are_bounded_for_each_key(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(a="max_concurrent: 1", b="max_concurrent: 1"))
    here.decode[0].mode = "held"
    first = asyncio.create_task(here.post(text(stream=True), **keys.bearer("a")))
    await here.decode[0].next_began()
    status, headers, body = await here.post(text(), **keys.bearer("a"))
    assert (status, headers["retry-after"]) == (429, "1")
    assert "1 requests in flight" in error_of(body)["message"]
    second = asyncio.create_task(here.post(text(), **keys.bearer("b")))
    await here.decode[0].next_began()
    assert await metric(here, 'kvrouter:key_requests_running{key="a"}') == 1
    here.decode[0].go.set()
    assert (await first)[0] == (await second)[0] == 200
    assert (await here.post(text(), **keys.bearer("a")))[0] == 200
    row = 'kvrouter:key_refused_total{key="a",reason="concurrency"}'
    assert await metric(here, row) == 1


async def test_a_client_that_leaves_gives_its_place_back(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(a="max_concurrent: 1"))
    here.decode[0].mode = "held"
    leaving = asyncio.create_task(here.post(text(), **keys.bearer("a")))
    await here.decode[0].next_began()
    leaving.cancel()
    [caller] = here.app.core.access.ring.all()
    await until(lambda: caller.running == 0)
    here.decode[0].mode = "ok"
    assert (await here.post(text(), **keys.bearer("a")))[0] == 200


async def test_what_a_request_used_counts_against_its_tokens(site: Open, keys: Keys) -> None:
    limits = "tokens_per_min: 0.6, token_burst: 20"
    here = await site(api_key_file=keys.write(a=limits, b=limits, c=limits))
    assert (await here.post(text(max_tokens=16), **keys.bearer("a")))[0] == 200
    status, headers, body = await here.post(text(max_tokens=16), **keys.bearer("a"))
    assert (status, error_of(body)["code"]) == (429, "rate_limit_exceeded")
    assert int(headers["retry-after"]) > 1
    used = {caller.name: caller for caller in here.app.core.access.ring.all()}
    assert used["a"].tokens == len(text()["prompt"]) // 4 + 16
    events = [{"type": "delta"}] * 30
    offer(here.decode, streaming(*events), "/v1/responses")
    responses = {"model": "m", "input": "a"}
    assert (await here.post(responses, "/v1/responses", **keys.bearer("b")))[0] == 200
    assert (await here.post(text(), **keys.bearer("b")))[0] == 429
    offer(here.decode, saying(200, {"usage": {"output_tokens": 33}}), "/v1/responses")
    assert (await here.post(responses, "/v1/responses", **keys.bearer("c")))[0] == 200
    assert (await here.post(text(), **keys.bearer("c")))[0] == 429


async def test_a_key_goes_no_further_than_the_gate(site: Open, keys: Keys) -> None:
    stream = io.BytesIO()
    lines = RequestLog(stream, plain=False)
    here = await site(api_key_file=keys.write(research=""), lines=lines, policy="prefix")
    offer(here.decode, saying(200, {"answer": 1}))
    wrong = "a-key-that-is-nobodys"
    await here.post(text(), **keys.bearer("research"))
    await here.post(text(prompt=["one", "two"]), **keys.bearer("research"))
    await here.post({"prompt": "a"}, "/tokenize", **keys.bearer("research"))
    await here.post(text(), authorization=f"Bearer {wrong}")
    here.app.core.metrics.settle()
    lines.flush()
    said = [stream.getvalue().decode()]
    named = [json.loads(line) for line in said[0].splitlines()]
    assert sorted((line["status"], line.get("key", "")) for line in named) == [
        *[(200, "research")] * 3,
        (401, ""),
    ]
    for path in OPEN:
        said.append((await here.get(path))[1].decode())
    for engine in (*here.prefill, *here.decode):
        assert engine.asked
        assert {shown for _, shown in engine.asked} == {None}
        said += [json.dumps(engine.headers), json.dumps(engine.requests)]
    for secret in (keys.of["research"], wrong):
        assert not any(secret in each for each in said)


async def test_a_keys_name_is_the_tenant_of_the_queue(site: Open, keys: Keys) -> None:
    settings: Any = {"max_concurrent_requests": 1, "tenant_header": "x-tenant"}
    here = await site(api_key_file=keys.write(a="", b=""), **settings)
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text(user="a0"), **keys.bearer("a")))]
    await here.prefill[0].next_began()
    asks = [("a1", "a", "x"), ("a2", "a", "y"), ("b1", "b", "x")]
    for count, (user, name, claimed) in enumerate(asks, start=1):
        headers = {**keys.bearer(name), "x-tenant": claimed}
        tasks.append(asyncio.create_task(here.post(text(user=user), **headers)))
        await until(lambda count=count: here.app.core.queue_wait.waiting == count)
    here.prefill[0].go.set()
    await asyncio.gather(*tasks)
    order = [request["user"] for request in here.decode[0].requests]
    assert order.index("b1") < order.index("a2")


def reload(here: Site) -> None:
    follow(here.app, here.app.settings)


async def test_keys_are_changed_without_dropping_a_stream(site: Open, keys: Keys) -> None:
    here = await site(api_key_file=keys.write(old="max_concurrent: 2", kept=""))
    here.decode[0].mode = "held"
    under_way = asyncio.create_task(here.post(text(stream=True), **keys.bearer("old")))
    await here.decode[0].next_began()
    keys.write(kept="models: [x]", fresh="")
    reload(here)
    assert (await here.post(text(), **keys.bearer("old")))[0] == 401
    assert (await here.post(text(), **keys.bearer("kept")))[0] == 404
    here.decode[0].go.set()
    status, _, body = await under_way
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert (await here.post(text(), **keys.bearer("fresh")))[0] == 200


async def test_keys_that_cannot_be_used_change_nothing(
    site: Open, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    here = await site(api_key_file=keys.write(a=""))
    secret = new_key()
    for content in ("", f"a: {secret}\n", "a: [\n"):
        keys.path.write_text(content)
        reload(here)
        assert (await here.post(text(), **keys.bearer("a")))[0] == 200
    keys.path.unlink()
    reload(here)
    follow(here.app, here.app.settings.model_copy(update={"api_key_file": ""}))
    assert (await here.post(text()))[0] == 401
    assert (await here.post(text(), **keys.bearer("a")))[0] == 200
    assert caplog.text.count("the router keeps its keys") == 5
    assert secret not in caplog.text


async def test_a_router_without_keys_can_be_given_some(site: Open, keys: Keys) -> None:
    here = await site()
    assert (await here.post(text(), authorization="Bearer user"))[0] == 200
    given = here.app.settings.model_copy(update={"api_key_file": keys.write(a="")})
    follow(here.app, given)
    assert (await here.post(text(), authorization="Bearer user"))[0] == 401
    assert (await here.post(text(), **keys.bearer("a")))[0] == 200
    assert [h.get("authorization") for h in here.decode[0].headers] == ["Bearer user", None]


# -- keys of engines

PATHS = {"/health", "/v1/models", "/version", "/metrics", "/v1/completions"}


def guarded(keys_of: list[str | None]) -> Any:
    def prepare(made: list[FakeEngine]) -> None:
        for engine, key in zip(made, keys_of, strict=True):
            engine.key = key
            engine.manifest = "ab" * 32  # so that its blocks are known, and prompts tokenised

    return prepare


async def test_engines_see_their_key_on_all_that_the_router_asks_and_never_a_users(
    site: Open, keys: Keys
) -> None:
    here = await site(
        prepare=guarded(["W", "W"]),
        worker_api_key=["W"],
        api_key_file=keys.write(a=""),
        policy="prefix",
        kv_connector="auto",
    )
    offer(here.decode, saying(200, {"answer": 1}), "/rerank", "/v1/responses")
    assert (await here.post(text(), **keys.bearer("a")))[0] == 200
    assert (await here.post(text(prompt=["a", "b"]), **keys.bearer("a")))[0] == 200
    assert (await here.post({"query": "q"}, "/rerank", **keys.bearer("a")))[0] == 200
    asked = [each for engine in (*here.prefill, *here.decode) for each in engine.asked]
    assert {path for path, _ in asked} >= {*PATHS, "/tokenize", "/rerank"}
    assert {shown for _, shown in asked} == {"Bearer W"}


async def test_each_engine_sees_its_own_key_and_no_other_ones(site: Open) -> None:
    given: list[str] = []

    def prepare(made: list[FakeEngine]) -> None:
        made[0].key, made[1].key = "P", "D"
        given.extend(f"{engine.address}={engine.key}" for engine in made)

    here = await site(prepare=prepare, worker_api_key=given, policy="prefix")
    assert (await here.post(text(), authorization="Bearer user"))[0] == 200
    assert {shown for _, shown in here.prefill[0].asked} == {"Bearer P"}
    assert {shown for _, shown in here.decode[0].asked} == {"Bearer D"}


async def test_without_keys_a_users_authorization_goes_on_its_legs_and_on_nothing_else(
    site: Open,
) -> None:
    here = await site(policy="prefix", kv_connector="auto")
    offer(here.decode, saying(200, {"answer": 1}), "/rerank")
    assert (await here.post(text(), authorization="Bearer user"))[0] == 200
    assert (await here.post({"query": "q"}, "/rerank", authorization="Bearer user"))[0] == 200
    assert (await here.post(text()))[0] == 200
    for engine in (*here.prefill, *here.decode):
        sent = [h.get("authorization") for h in engine.headers]
        assert sent == ["Bearer user", None]
        others = {shown for path, shown in engine.asked if path in PATHS - {"/v1/completions"}}
        assert others == {None}
        assert {shown for path, shown in engine.asked if path == "/tokenize"} <= {None}
    assert ("/rerank", "Bearer user") in here.decode[0].asked


@pytest.mark.parametrize("path", ["/v1/completions", "/rerank"])
async def test_an_engine_that_refuses_the_routers_key_is_to_blame_and_not_the_client(
    site: Open, keys: Keys, path: str
) -> None:
    here = await site(0, 2, worker_api_key=["W"], api_key_file=keys.write(a=""))
    offer(here.decode, saying(200, {"answer": 1}), "/rerank")
    here.decode[0].key = "another"
    for _ in range(4):
        assert (await here.post(text(), path, **keys.bearer("a")))[0] == 200
    here.decode[1].key = "another"
    status, _, body = await here.post(text(), path, **keys.bearer("a"))
    assert status == 503
    assert b"Unauthorized" not in body


@pytest.mark.parametrize("path", ["/v1/completions", "/rerank"])
async def test_an_engine_that_refuses_the_users_authorization_says_so_itself(
    site: Open, path: str
) -> None:
    here = await site(0, 1)
    offer(here.decode, saying(200, {"answer": 1}), "/rerank")
    here.decode[0].key = "user"
    assert (await here.post(text(), path, authorization="Bearer user"))[0] == 200
    assert (await here.post(text(), path, authorization="Bearer other"))[0] == 401


async def test_an_engine_that_wants_a_key_tells_the_remedy(site: Open) -> None:
    here = await site(0, 1, prepare=guarded(["W"]))
    [engine] = here.app.core.pool.all()
    problem = here.app.members.prober.problem(engine)
    assert problem is not None
    assert "answers 401" in problem
    assert "--worker-api-key" in problem


async def test_other_keys_of_engines_hold_from_the_next_leg_on(site: Open, tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("first\n")
    path.chmod(0o600)
    here = await site(prepare=guarded(["first"] * 2), worker_api_key_file=str(path))
    assert (await here.post(text()))[0] == 200
    path.write_text("second\n")
    reload(here)
    for engine in (*here.prefill, *here.decode):
        engine.key = "second"
    assert (await here.post(text()))[0] == 200


async def test_the_doctor_shows_engines_their_key_too() -> None:
    async with engines(1) as [made]:
        made.key = "W"
        engine = Engine(made.address, Role.DECODE)
        async with ProbeClient(WorkerKeys({made.address: "W"})) as asker:
            assert b'"m"' in (await asker.ask(engine, "/v1/models", None, 20)).body
        async with ProbeClient() as asker:
            with pytest.raises(ProbeFailed, match="401"):
                await asker.ask(engine, "/v1/models", None, 20)
