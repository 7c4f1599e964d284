"""Aliases of models: what engines see, who gets which version, and what clients see of it."""

import asyncio
import io
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, chat, metric, text
from tests.integration.router.test_keys import Keys
from tests.integration.router.test_models import listed
from tests.integration.router.test_passthrough import POSTED, offer, saying

from kvrouter.app.reload import follow
from kvrouter.engines.engine import Role
from kvrouter.telemetry.request_log import RequestLog
from kvrouter_store.identity.chain import root_hash

SPLIT = ["chat=a:90,b:10"]
SESSIONS = 300
FEWEST, MOST = 10, 50
"""Of 300 sessions at 10 %: four standard deviations around 30."""


def versions(made: list[FakeEngine]) -> None:
    """The engines serve a, b, a, b and so on."""
    for place, engine in enumerate(made):
        engine.model = "ab"[place % 2]


def told(session: int, turn: int) -> Json:
    """A request of a session, in which the user has spoken so often."""
    messages = [{"role": "system", "content": "Be kind."}]
    for said in range(turn + 1):
        messages.append({"role": "user", "content": f"{session} says {said}"})
        messages.append({"role": "assistant", "content": f"Indeed: {said}"})
    return {"model": "chat", "messages": messages[:-1], "max_tokens": 1}


def sessions_of(engine: FakeEngine) -> set[str]:
    return {body["messages"][1]["content"].split()[0] for body in engine.requests}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", text()),
        ("/v1/completions", text(stream=True)),
        ("/v1/completions", text(n=2)),
        ("/v1/completions", text(prompt=["one", "two"], stream=True)),
        ("/v1/completions", text(prompt=[[5, 6], [7, 8, 9]])),
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(stream=True, n=2)),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["model first", "model last"])
async def test_engines_see_their_models_own_name(
    site: Open, path: str, body: Json, *, first: bool
) -> None:
    def own(made: list[FakeEngine]) -> None:
        for engine in made:
            engine.model = "org/a-model-with-a-long-name:8b"

    here = await site(2, 2, prepare=own, model_alias=['"c"=org/a-model-with-a-long-name:8b'])
    rest = {name: value for name, value in body.items() if name != "model"}
    status, _, answer = await here.post(
        {"model": '"c"', **rest} if first else {**rest, "model": '"c"'}, path
    )
    assert status == 200, answer
    seen = [request for engine in (*here.prefill, *here.decode) for request in engine.requests]
    assert {request["model"] for request in seen} == {here.decode[0].model}
    prompts = [each for each in seen if each.get("prompt", each.get("messages"))]
    assert len(prompts) == len(seen)
    assert here.decode[0].model in answer.decode() or path.endswith("chat/completions")


async def test_every_endpoint_that_one_engine_answers_gets_the_models_own_name(site: Open) -> None:
    here = await site(0, 1, model_alias=["alias=m"])
    offer(here.decode, saying(200, {"answer": 1}))
    for path in POSTED:
        assert (await here.post({**text(), "model": "alias", "input": "a"}, path))[0] == 200
    assert {json.loads(body)["model"] for _, body in here.decode[0].posted} == {"m"}


async def test_an_engine_is_asked_for_tokens_of_its_own_model(site: Open) -> None:
    def prepare(made: list[FakeEngine]) -> None:
        for engine in made:
            engine.manifest = root_hash("any").hex()
            engine.pages["/tokenize"] = saying(200, {"tokens": [1, 2]})

    here = await site(0, 1, prepare=prepare, policy="prefix", model_alias=["alias=m"])
    assert (await here.post(text(model="alias")))[0] == 200
    assert [json.loads(body)["model"] for _, body in here.decode[0].posted] == ["m"]
    assert here.decode[0].requests[0]["prompt"] == [1, 2]


async def test_all_turns_of_a_session_get_one_version_and_each_version_its_share(
    site: Open,
) -> None:
    here = await site(0, 4, prepare=versions, model_alias=SPLIT)
    for turn in range(2):
        answers = [here.post(told(each, turn), "/v1/chat/completions") for each in range(SESSIONS)]
        assert {status for status, _, _ in await asyncio.gather(*answers)} == {200}
    of_a = sessions_of(here.decode[0]) | sessions_of(here.decode[2])
    of_b = sessions_of(here.decode[1]) | sessions_of(here.decode[3])
    assert of_a.isdisjoint(of_b)
    assert len(of_a) + len(of_b) == SESSIONS
    assert FEWEST < len(of_b) < MOST
    counted = 'kvrouter:alias_requests_total{alias="chat",model="b"}'
    assert await metric(here, counted) == 2 * len(of_b)


async def test_a_session_named_by_a_header_keeps_its_version_whatever_it_says(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=["chat=a,b"], session_key="X-Mine")
    found: dict[str, set[str]] = defaultdict(set)
    for number in range(60):
        named = {"x-mine": f"s{number % 20}"}
        _, _, answer = await here.post(text(model="chat", prompt=f"p{number}"), **named)
        found[named["x-mine"]].add(json.loads(answer)["model"])
    assert {len(models) for models in found.values()} == {1}
    assert len(set.union(*found.values())) == 2


async def test_texts_without_a_session_are_shared_even_if_all_are_the_same(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=["chat=a,b"])
    answers = await asyncio.gather(*(here.post(text(model="chat")) for _ in range(100)))
    models = Counter(json.loads(answer)["model"] for _, _, answer in answers)
    assert 30 < models["a"] < 70


async def test_a_version_that_is_away_is_served_by_the_others(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=["chat=a,b"])
    pool, body = here.app.core.pool, text(model="chat")

    async def served() -> set[str]:
        found = [await here.post(body, **{"x-session-id": f"s{each}"}) for each in range(20)]
        assert {status for status, _, _ in found} == {200}
        return {json.loads(answer)["model"] for _, _, answer in found}

    assert await served() == {"a", "b"}
    await here.decode[1].stop()
    await until(lambda: not pool.engines(Role.DECODE, "b"))
    assert await served() == {"a"}
    await here.decode[1].start()
    await until(lambda: pool.engines(Role.DECODE, "b"))
    assert await served() == {"a", "b"}


async def test_a_request_waits_until_an_engine_of_any_version_is_there(site: Open) -> None:
    here = await site(0, 3, prepare=versions, model_alias=["chat=b,c"], engine_wait_s=30)
    await here.decode[1].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE, "b"))
    task = asyncio.create_task(here.post(text(model="chat")))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    await here.decode[1].start()
    assert (await task)[0] == 200
    here.app.core.engine_wait.timeout_s = 0
    await here.decode[1].stop()
    await until(lambda: not here.app.core.pool.engines(Role.DECODE, "b"))
    assert (await here.post(text(model="chat")))[0] == 503


async def test_other_names_are_unknown_and_models_keep_their_own(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=SPLIT)
    for model, status in (("a", 200), ("b", 200), ("chat", 200), ("Chat", 404), ("chat:90", 404)):
        assert (await here.post(text(model=model)))[0] == status
    status, _, answer = await here.post(text(model="Chat"))
    error = json.loads(answer)["error"]
    assert (error["type"], error["code"]) == ("NotFoundError", "model_not_found")
    assert (error["param"], error["message"]) == ("model", "The model `Chat` does not exist.")
    status, _, answer = await here.post({"prompt": "a"})
    assert status == 400  # two models, and the alias is none


async def test_the_list_of_models_has_the_aliases_of_those_that_are_there(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=[*SPLIT, "gone=c"])
    cards = await listed(here)
    assert list(cards) == ["a", "b", "chat"]
    assert cards["chat"] == {**cards["b"], "id": "chat", "root": "a"}
    status, answer = await here.get("/v1/models/chat")
    assert (status, json.loads(answer)) == (200, cards["chat"])
    assert (await here.get("/v1/models/gone"))[0] == 404


async def test_an_alias_may_hide_one_of_its_models(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=["a=a:0,b:1"])
    _, _, answer = await here.post(text(model="a"))
    assert json.loads(answer)["model"] == "b"
    assert {name: card["root"] for name, card in (await listed(here)).items()} == {
        "a": "b",
        "b": "b",
    }


async def test_a_key_needs_a_right_to_the_name_that_it_asks_for_alone(
    site: Open, tmp_path: Path
) -> None:
    keys = Keys(tmp_path)
    file = keys.write(alias="models: [chat]", model="models: [a]", all="")
    here = await site(0, 2, prepare=versions, model_alias=["chat=a,b"], api_key_file=file)
    allowed = {"alias": ["chat"], "model": ["a"], "all": ["a", "b", "chat"]}
    for name, models in allowed.items():
        headers = keys.bearer(name)
        async with here.http.get(here.url("/v1/models"), headers=headers) as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == models
        for model in ("a", "b", "chat"):
            status, _, said = await here.post(text(model=model), **headers)
            assert status == (200 if model in models else 404), said


async def test_new_weights_move_few_sessions_and_requests_in_flight_go_on(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_alias=SPLIT)

    async def served() -> dict[int, str]:
        found = {}
        for each in range(SESSIONS):
            body = told(each, 0)
            _, _, answer = await here.post(body, "/v1/chat/completions")
            found[each] = json.loads(answer)["model"]
        return found

    def weigh(*aliases: str) -> None:
        changed = here.app.settings.model_copy(update={"model_alias": list(aliases)})
        follow(here.app, changed)

    before = await served()
    here.decode[0].mode = "held"
    session = next(each for each, model in before.items() if model == "a")
    task = asyncio.create_task(here.post(told(session, 0), "/v1/chat/completions"))
    while not (await here.decode[0].next_began())["messages"][1]["content"].startswith(
        f"{session} "
    ):
        pass
    weigh("chat=a:80,b:20")
    here.decode[0].go.set()
    assert (await task)[0] == 200
    after = await served()
    changed = {(before[each], after[each]) for each in before if before[each] != after[each]}
    assert changed == {("a", "b")}
    assert FEWEST < sum(before[each] != after[each] for each in before) < MOST
    weigh()
    assert (await here.post(told(0, 0), "/v1/chat/completions"))[0] == 404


async def test_a_line_of_the_log_has_the_alias_and_its_version(site: Open) -> None:
    written = io.BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(0, 2, prepare=versions, model_alias=["chat=b"], lines=lines)
    offer(here.decode, saying(200, {"answer": 1}), "/v1/embeddings")
    await here.post(text(model="chat"))
    await here.post({"model": "chat", "input": "a"}, "/v1/embeddings")
    await here.post(text(model="a"))
    await here.get("/metrics")
    lines.flush()
    told_: list[dict[str, Any]] = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(each["model"], each.get("version")) for each in told_] == [
        ("chat", "b"),
        ("chat", "b"),
        ("a", None),
    ]
