"""Several prompts or samples in one request: legs of their own, one answer, nothing left behind."""

import asyncio
import json
from io import BytesIO

import openai
import pytest
from tests.fakes.openai_cases import COMPLETIONS, events
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, metric, text

from kvrouter.openai.sse import MAX_EVENT_BYTES
from kvrouter.telemetry.request_log import RequestLog

# -- what the legs are asked


async def test_each_prompt_takes_legs_of_its_own(site: Open) -> None:
    here = await site(2, 2)
    status, headers, _ = await here.post(
        text(prompt=["one", "two"], user="u"), **{"x-request-id": "mine"}
    )
    assert status == 200
    assert headers["x-request-id"] == "mine"
    for pool in (here.prefill, here.decode):
        sent = [body for engine in pool for body in engine.requests]
        assert len(sent) == 2
        assert all(body["user"] == "u" for body in sent)
        ids = {fields["x-request-id"] for engine in pool for fields in engine.headers}
        assert ids == {"mine-0", "mine-1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_go_alone_where_a_hand_over_is_fetched_once(site: Open, stream: bool) -> None:
    here = await site(kv_connector="nixl")
    await here.post(text(n=2, seed=3, stream=stream))
    assert [("n" in body, body["seed"]) for body in here.decode[0].requests] == [
        (False, 3),
        (False, 4),
    ]
    assert all("n" not in body for body in here.prefill[0].requests)
    assert len(here.prefill[0].requests) == 2


async def test_samples_of_engines_that_draw_them_from_one_prompt_stay_together(
    site: Open,
) -> None:
    here = await site(store="kv://127.0.0.1:1")
    await here.post(text(n=2, seed=3))
    (first,), (second,) = here.prefill[0].requests, here.decode[0].requests
    assert "n" not in first
    assert (second["n"], second["seed"]) == (2, 3)


async def test_a_whole_answer_has_the_cached_tokens_of_all_prefill_legs(site: Open) -> None:
    here = await site()
    here.prefill[0].cached_tokens, here.decode[0].cached_tokens = 3, 15
    _, _, body = await here.post(text(prompt=["one", "two"]))
    assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


# -- bounds


async def test_each_share_counts_as_a_request_under_way(site: Open) -> None:
    here = await site(max_concurrent_requests=3, queue_size=0)
    here.decode[0].mode = "held"
    under_way = asyncio.create_task(here.post(text(prompt=["a", "b", "c", "d"])))
    await until(lambda: len(here.decode[0].requests) == 4)
    assert (await here.post(text()))[0] == 429
    here.decode[0].go.set()
    assert (await under_way)[0] == 200
    assert (await here.post(text(prompt=["a", "b", "c"])))[0] == 200


async def test_a_request_may_ask_for_so_many_choices(site: Open) -> None:
    here = await site(max_choices=4, kv_connector="nixl")
    assert (await here.post(text(prompt=["a", "b"], n=2)))[0] == 200
    for more in ({"n": 5}, {"prompt": ["a", "b"], "n": 3}):
        status, _, body = await here.post(text(**more))
        assert status == 400
        assert json.loads(body)["error"]["param"] in more


async def test_one_line_tells_of_all_shares(site: Open) -> None:
    written = BytesIO()
    here = await site(2, 2, lines=RequestLog(written, plain=False))
    await here.post(text(prompt=["one", "two", "three"]), **{"x-request-id": "mine"})
    await here.app.close()
    (line,) = map(json.loads, written.getvalue().splitlines())
    assert (line["request_id"], line["status"], line["outcome"]) == ("mine", 200, "length")
    assert (line["shares"], line["attempts"], line["generated"]) == (3, 3, 12)
    assert set(line["prefill"].split(",")) == {e.address for e in here.prefill}
    assert set(line["decode"].split(",")) == {e.address for e in here.decode}
    assert line["plan"] == "prefill"
    assert line["ttft_ms"] > 0


async def test_the_openai_client_gets_every_choice(site: Open) -> None:
    here = await site(1, 2, kv_connector="nixl")
    async with openai.AsyncOpenAI(base_url=here.url("/v1"), api_key="k", max_retries=0) as client:
        whole = await client.completions.create(
            model="m", prompt=["a", "b"], n=2, max_tokens=3, seed=1
        )
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in whole.choices} == {" t0 t1 t2"}
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 12)
        stream = await client.completions.create(
            model="m", prompt=[[1], [2, 3]], max_tokens=2, stream=True
        )
        said = {0: "", 1: ""}
        async for part in stream:
            said[part.choices[0].index] += part.choices[0].text
        assert said == {0: " t0 t1", 1: " t0 t1"}
        talk = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], n=3, max_tokens=3
        )
        assert [choice.message.content for choice in talk.choices] == [" t0 t1 t2"] * 3


# -- failures


@pytest.mark.parametrize("stream", [False, True])
async def test_a_share_whose_engine_fails_goes_to_another_one(site: Open, stream: bool) -> None:
    here = await site(1, 2)
    here.decode[0].mode = "500"
    status, _, body = await here.post(text(prompt=["a", "b", "c"], stream=stream))
    assert status == 200
    told = events(body) if stream else [json.loads(body)]
    assert {choice["index"] for event in told for choice in event["choices"]} == {0, 1, 2}
    assert len(here.decode[1].requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_share_that_fails_ends_the_others(site: Open, stream: bool) -> None:
    here = await site(2, 2)
    for engine in here.decode:
        engine.mode = "hang"
    task = asyncio.create_task(here.post(text(prompt=["a", "b"], stream=stream)))
    for engine in here.decode:
        await engine.next_began()
    await here.decode[0].stop()  # the other one is asked, and both hang there
    await here.decode[1].next_began()
    await here.decode[1].stop()
    status, _, body = await task
    assert status == 503
    assert json.loads(body)["error"]["message"]


async def test_a_stream_that_breaks_off_ends_the_others_with_an_error(site: Open) -> None:
    here = await site(2, 2)
    here.decode[0].mode, here.decode[1].mode = "hang_mid", "drop_mid"
    status, _, body = await here.post(text(prompt=["a", "b"], stream=True))
    assert status == 200
    *told, last = events(body)
    assert last["error"]["code"] == 502
    assert all(event["choices"][0]["index"] in (0, 1) for event in told)
    await here.decode[0].next_left()
    assert await metric(here, 'kvrouter:upstream_errors_total{leg="decode"') == 1


async def test_an_engines_error_event_is_the_streams_last(site: Open) -> None:
    here = await site(2, 2)
    here.decode[0].mode = "hang_mid"
    problem = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    began = here.decode[1].event(0, last=False)
    here.decode[1].event = lambda i, *, last: problem if i else began  # type: ignore[method-assign]
    status, _, body = await here.post(text(prompt=["a", "b"], stream=True))
    assert status == 200
    assert body.endswith(problem + b"data: [DONE]\n\n")
    await here.decode[0].next_left()


async def test_an_event_without_an_end_ends_the_stream(site: Open) -> None:
    here = await site(2, 2)
    here.decode[0].mode = "hang_mid"
    endless = b"data: " + b"x" * MAX_EVENT_BYTES
    began = here.decode[1].event(0, last=False)
    here.decode[1].event = lambda i, *, last: endless if i else began  # type: ignore[method-assign]
    _, _, body = await here.post(text(prompt=["a", "b"], stream=True))
    assert events(body)[-1]["error"]["code"] == 502
    assert b"xxx" not in body
    await here.decode[0].next_left()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_joined_is_an_error(site: Open, stream: bool) -> None:
    here = await site()
    here.decode[0].mode = "garbage"
    here.decode[0].event = lambda i, *, last: b"data: {}\n\n"  # type: ignore[method-assign]
    status, _, body = await here.post(text(prompt=["a", "b"], stream=stream))
    told = events(body)[-1] if stream else json.loads(body)
    assert status == (200 if stream else 502)
    assert told["error"]["code"] == 502


@pytest.mark.parametrize("mode", ["hang", "hang_mid"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_every_leg_with_it(
    site: Open, mode: str, stream: bool
) -> None:
    here = await site(1, 2)
    for engine in here.decode:
        engine.mode = mode if stream else "hang"
    request = here.http.post(here.url(COMPLETIONS), json=text(prompt=["a"] * 6, stream=stream))
    task = asyncio.ensure_future(request.__aenter__())
    for _ in range(3):
        for engine in here.decode:
            await engine.next_began()
    if stream and mode == "hang_mid":
        answer = await task
        await answer.content.readany()
        answer.close()
    task.cancel()
    for _ in range(3):
        for engine in here.decode:
            await engine.next_left()
    await until(lambda: here.app.core.metrics.running == 0)
    assert await metric(here, 'kvrouter:request_errors_total{code="499",') == 1


async def test_a_client_that_reads_slowly_holds_every_engine_back(site: Open) -> None:
    here = await site(1, 2)
    for engine in here.decode:
        engine.event_bytes, engine.events = 200_000, 300
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port, limit=2**16)
    body = json.dumps(text(prompt=["a", "b"], stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    async with asyncio.timeout(20):
        for engine in here.decode:
            await engine.paused.wait()
        seen = b""
        while b"[DONE]" not in seen:
            seen = (seen + await reader.read(2**20))[-(2**21) :]
    writer.close()
