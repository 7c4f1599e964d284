"""What every family must keep: the tokens of one engine alone, whatever fails, and nothing left."""

import asyncio
import json

import pytest
from tests.contract.families.conftest import KINDS, STEERING, Open, Site, chat, ids, said, text
from tests.fakes.patience import until
from tests.fakes.pd import Json, PdEngine

from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import LegOrder

NAMES = sorted(FAMILIES)
PAIRED = [name for name in NAMES if FAMILIES[name].order is not LegOrder.SINGLE]
PINNING = ["mooncake", "nixl"]
FETCHED_ONCE = [name for name in NAMES if FAMILIES[name].order.fetches_once]
pytestmark = pytest.mark.tested("vllm", "MooncakeConnector", "double")
EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERY = pytest.mark.parametrize("family", NAMES)
EVERY_PAIR = pytest.mark.parametrize("family", PAIRED)


def test_every_family_has_a_fake_that_keeps_its_rules() -> None:
    assert sorted(KINDS) == NAMES


@EITHER
@EVERY
async def test_answers_are_those_of_one_engine_alone(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 2, 2)
    for body in (text(stream=stream), ids(stream=stream), text(stream=stream, min_tokens=3)):
        await here.same(body)
    await here.same(chat(stream=stream, max_completion_tokens=5), "/v1/chat/completions")
    prefilled = sum(len(engine.requests) for engine in here.prefill)
    assert prefilled == (4 if family in PAIRED else 0)
    assert sum(len(engine.requests) for engine in here.decode) == 4
    handed = 4 if family in FETCHED_ONCE else 0
    assert sum(getattr(engine, "fetched", 0) for engine in here.decode) == handed


@EITHER
@EVERY
async def test_several_prompts_and_samples_are_those_of_one_engine_alone(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 2, 2)
    prompts = [list(range(first, first + 40)) for first in (300, 400, 500)]
    best = {"prompt": prompts[0], "n": 3, "seed": 3, "best_of": 5}  # heeded by no engine
    for more in ({}, {"n": 2, "seed": 3}, best):
        body = {**ids(stream=stream), "prompt": prompts, **more}
        assert await choices(here, body, here.port) == await choices(here, body, here.alone.port)
    body = chat(stream=stream, n=3, seed=3)
    path = "/v1/chat/completions"
    told = await choices(here, body, here.port, path)
    assert told == await choices(here, body, here.alone.port, path)
    assert len(set(told.values())) == (1 if family == "sglang" else 3)  # SGLang: of one seed
    legs = 3 + 6 + 3 + 3 if family in FETCHED_ONCE else 3 + 3 + 1 + 1
    assert sum(len(engine.requests) for engine in here.decode) == legs
    prefilled = sum(len(engine.requests) for engine in here.prefill)
    assert prefilled == (legs if family in PAIRED else 0)


async def choices(
    here: Site, body: Json, port: int, path: str = "/v1/completions"
) -> dict[int, str]:
    """What was said of each choice, whole or streamed."""
    status, raw = await here.post(body, path, port)
    assert status == 200, raw
    streamed = raw.startswith(b"data:")
    parts = [part[6:] for part in raw.split(b"\n\n")[:-2]] if streamed else [raw]
    events = [json.loads(part) for part in parts]
    told: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        part = choice.get("text") or choice.get("delta") or choice.get("message") or ""
        text = part if isinstance(part, str) else part.get("content") or ""
        told[choice["index"]] = told.get(choice["index"], "") + text
    return dict(sorted(told.items()))


@EVERY
async def test_many_at_a_time_do_not_mix(open_site: Open, family: str) -> None:
    here = await open_site(family, 2, 2)
    asked = [here.same(ids(300 + i, stream=bool(i % 2))) for i in range(24)]
    assert len(set(await asyncio.gather(*asked))) == 24


@EITHER
@EVERY
async def test_a_client_cannot_steer_transfers_nor_see_them(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family)
    overrides = {"x-override-bootstrap-room": "7", "x-override-rid": "r"}
    status, raw = await here.post(text(stream=stream, **STEERING), headers=overrides)
    assert status == 200
    _, expected = await here.post(text(stream=stream), port=here.alone.port)
    assert said(raw) == said(expected)
    for name in STEERING:
        assert f'"{name}"'.encode() not in raw
    for engine in here.engines:
        assert not any(name.startswith("x-override") for sent in engine.headers for name in sent)
        for sent in engine.requests:
            assert not any(sent.get(name) == value for name, value in STEERING.items())


@EITHER
@EVERY_PAIR
async def test_a_prefill_engine_that_is_gone_is_replaced(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 2, 1)
    await here.prefill[0].stop()
    for first in range(4):
        await here.same(ids(300 + first, stream=stream))
    assert len(here.prefill[1].requests) == 4


@EITHER
@EVERY
async def test_a_decode_engine_that_is_gone_is_replaced(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 1, 2)
    await here.decode[0].stop()
    for first in range(4):
        await here.same(ids(300 + first, stream=stream))


@EITHER
@pytest.mark.parametrize("mode", ["500", "drop"])
@EVERY_PAIR
async def test_a_prefill_leg_that_fails_costs_no_answer(
    open_site: Open, family: str, mode: str, stream: bool
) -> None:
    here = await open_site(family, 2, 2)
    here.prefill[0].mode = mode
    for first in range(3):
        await here.same(ids(300 + first, stream=stream))


@EITHER
@pytest.mark.parametrize("mode", ["500", "drop"])
@EVERY
async def test_a_decode_leg_that_fails_before_its_first_byte_costs_no_answer(
    open_site: Open, family: str, mode: str, stream: bool
) -> None:
    here = await open_site(family, 2, 2)
    here.decode[0].mode = mode
    for first in range(3):
        await here.same(ids(300 + first, stream=stream))


@EVERY
async def test_a_whole_answer_that_breaks_off_comes_from_another_engine(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 2)
    here.decode[0].mode = "drop_mid"
    for first in range(3):
        await here.same(ids(300 + first))


@EVERY
async def test_a_stream_that_breaks_off_ends_with_an_error_event(
    open_site: Open, family: str
) -> None:
    here = await open_site(family)
    here.decode[0].mode = "drop_mid"
    status, raw = await here.post(text(stream=True))
    assert status == 200
    frames = raw.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert json.loads(frames[-3].removeprefix(b"data: "))["error"]["code"] == 502


@pytest.mark.parametrize("mode", ["drop_mid", "error_mid"])
@EVERY_PAIR
async def test_a_stream_that_breaks_off_goes_on_elsewhere(
    open_site: Open, family: str, mode: str
) -> None:
    here = await open_site(family, 2, 2, resume_streams=True)
    here.decode[0].mode = mode
    for first in range(2):
        await here.same(ids(300 + first, stream=True, temperature=0))
        await here.same(ids(300 + first, stream=True))
        several = ids(300, stream=True) | {"prompt": [[7] * 20, [8] * 30]}
        assert await choices(here, several, here.port) == await choices(
            here, several, here.alone.port
        )
        if family in FETCHED_ONCE:
            samples = ids(300 + first, stream=True, n=2)
            assert await choices(here, samples, here.port) == await choices(
                here, samples, here.alone.port
            )
        if family != "sglang":
            await here.same(chat(stream=True), "/v1/chat/completions")
    assert await here.metric('kvrouter:streams_broken_total{outcome="resumed"}') >= 2
    assert await here.metric('kvrouter:streams_broken_total{outcome="given up"}') == 0


@EVERY_PAIR
async def test_a_stream_on_an_engine_that_is_removed_by_force_goes_on_elsewhere(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 2, 2, resume_streams=True, admin=True)
    body = ids(stream=True)
    for engine in here.decode:
        engine.mode = "hang_mid"
    root = f"http://127.0.0.1:{here.port}"
    async with here.http.post(f"{root}/v1/completions", json=body) as answer:
        begun = [await answer.content.readuntil(b"\n\n") for _ in range(2)]
        leaving, staying = sorted(here.decode, key=lambda engine: -engine.live)
        staying.mode = "ok"
        async with here.http.delete(f"{root}/workers/{leaving.address}?force=true") as removed:
            assert (removed.status, (await removed.json())["cut"]) == (200, 1)
        raw = b"".join(begun) + await answer.read()
    _, expected = await here.post(body, port=here.alone.port)
    assert said(raw) == said(expected)
    assert await here.metric('kvrouter:streams_broken_total{outcome="resumed"}') == 1
    assert here.app.core.pool.find(leaving.address) is None


@EVERY
async def test_only_engines_that_can_name_their_tokens_are_asked_to(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, resume_streams=True)
    await here.same(ids(stream=True))
    await here.same(chat(stream=True), "/v1/chat/completions")
    await here.same(ids(stream=False))
    asked = [sent.get("return_token_ids", False) for sent in here.decode[0].requests]
    assert asked == [family in PAIRED, family in PAIRED and family != "sglang", False]


@pytest.mark.parametrize("resume", [False, True])
@EVERY
async def test_a_stream_that_breaks_off_after_its_end_mark_is_whole(
    open_site: Open, family: str, resume: bool
) -> None:
    here = await open_site(family, resume_streams=resume)
    here.decode[0].mode = here.alone.mode = "drop_end"
    for more in ({}, {"stream_options": {"include_usage": True}}, {"prompt": [[7] * 20, [8] * 9]}):
        status, raw = await here.post(ids(stream=True) | more)
        assert status == 200
        assert raw.count(b"[DONE]") == 1
        assert b'"error"' not in raw
        assert raw.endswith(b"data: [DONE]\n\n")
        assert raw.count(b'"length"') == (2 if "prompt" in more else 1)
    assert await here.metric('kvrouter:streams_broken_total{outcome="given up"}') == 0


async def leave(here: Site, engine: PdEngine, stream: bool) -> None:
    """A client that leaves when its leg on that engine has begun."""
    task = asyncio.create_task(here.post(ids(stream=stream)))
    await engine.next_began()
    task.cancel()
    await until(lambda: not here.app.core.metrics.running)


@EITHER
@EVERY_PAIR
async def test_a_client_that_leaves_during_prefill_leaves_nothing_behind(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family)
    here.prefill[0].mode = "hang"
    await leave(here, here.prefill[0], stream)
    await here.quiet()
    here.prefill[0].mode = "ok"
    await here.same(ids(stream=stream))


@EITHER
@pytest.mark.parametrize("mode", ["hang", "hang_mid"])
@EVERY
async def test_a_client_that_leaves_during_decode_leaves_nothing_behind(
    open_site: Open, family: str, mode: str, stream: bool
) -> None:
    here = await open_site(family)
    here.decode[0].mode = mode
    await leave(here, here.decode[0], stream)
    await here.quiet()
    here.decode[0].mode = "ok"
    await here.same(ids(stream=stream))


@pytest.mark.parametrize("family", PINNING)
async def test_what_no_decode_engine_fetches_is_released_at_once(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 2)
    here.decode[0].mode = here.decode[1].mode = "held"  # read, and then cut off unscheduled
    asked = [asyncio.create_task(here.post(ids(300 + i))) for i in range(4)]
    for first in (0, 1, 0, 1):
        await here.decode[first].next_began()
    for task in asked:
        task.cancel()
    await here.quiet()
    assert await here.metric('kvrouter:stranded_release_total{outcome="released"}') == 4


@pytest.mark.parametrize("family", ["mooncake", "mooncake-legacy", "nixl", "p2p", "store"])
async def test_without_prefill_engines_decode_computes_within_the_budget(
    open_site: Open, family: str
) -> None:
    here = await open_site(family)
    await here.prefill[0].stop()
    await here.same(ids())
    assert here.decode[0].computed
    poor = await open_site(family, recompute_budget_tokens=0)
    await poor.prefill[0].stop()
    assert (await poor.post(ids()))[0] == 429


@EVERY
async def test_an_engines_refusal_reaches_the_client(open_site: Open, family: str) -> None:
    here = await open_site(family)
    status, raw = await here.post(text(temperature=3))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "temperature")
