"""The life of a request that goes well, and of one that never begins."""

import json

import openai
import pytest
from tests.integration.router.conftest import Json, Open, chat, text


async def test_a_completion_takes_both_legs(site: Open) -> None:
    here = await site()
    status, headers, body = await here.post(
        text(min_tokens=2, stop=["x"], n=1, user="u"),
        authorization="Bearer key",
        **{"x-request-id": "mine-1", "traceparent": "00-a-b-01"},
    )
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == " t0 t1 t2 t3"
    assert headers["x-request-id"] == "mine-1"
    (first,), (second,) = here.prefill[0].requests, here.decode[0].requests
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert "min_tokens" not in first
    assert "stop" not in first
    assert (second["max_tokens"], second["min_tokens"], second["stop"]) == (4, 2, ["x"])
    for engine in (*here.prefill, *here.decode):
        (sent,) = engine.headers
        assert sent["authorization"] == "Bearer key"
        assert sent["x-request-id"] == "mine-1"
        assert sent["traceparent"] == "00-a-b-01"


async def test_the_prompt_is_tokenised_once(site: Open) -> None:
    here = await site()
    await here.post(text())
    assert here.prefill[0].requests[0]["prompt"] == "Hello, you there"
    assert here.decode[0].requests[0]["prompt"] == [ord(c) for c in "Hello, you there"]


async def test_token_ids_pass_through_to_both_legs(site: Open) -> None:
    here = await site(policy="prefix")
    ids = [0, 7, 2**32 - 1]
    status, _, body = await here.post(text(prompt=ids))
    assert status == 200
    assert json.loads(body)["usage"]["prompt_tokens"] == 3
    assert here.prefill[0].requests[0]["prompt"] == ids
    assert here.decode[0].requests[0]["prompt"] == ids


async def test_a_stream_arrives_byte_for_byte(site: Open) -> None:
    here = await site()
    status, headers, body = await here.post(text(stream=True))
    engine = here.decode[0]
    events = [engine.event(i, last=i == 3) for i in range(4)]
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert body == b"".join(events) + b"data: [DONE]\n\n"


async def test_a_chat_takes_both_legs(site: Open) -> None:
    here = await site()
    status, _, body = await here.post(chat(max_completion_tokens=3), "/v1/chat/completions")
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["role"] == "assistant"
    assert here.prefill[0].requests[0]["max_completion_tokens"] == 1
    assert here.decode[0].requests[0]["max_completion_tokens"] == 3


async def test_an_insane_request_id_is_replaced(site: Open) -> None:
    here = await site()
    _, headers, _ = await here.post(text(), **{"x-request-id": "a b"})
    assert " " not in headers["x-request-id"]
    _, other, _ = await here.post(text())
    assert headers["x-request-id"] != other["x-request-id"]


async def test_transfer_parameters_neither_come_from_the_client_nor_reach_it(site: Open) -> None:
    here = await site(store="kv://127.0.0.1:1")
    here.decode[0].manifest = "ab" * 32
    status, _, body = await here.post(text(kv_transfer_params={"do_remote_decode": True}))
    assert status == 200
    assert "kv_transfer_params" not in json.loads(body)
    assert "kv_transfer_params" not in here.prefill[0].requests[0]
    assert "kv_transfer_params" not in here.decode[0].requests[0]


async def test_cached_tokens_are_those_of_the_prefill_leg(site: Open) -> None:
    here = await site()
    here.prefill[0].cached_tokens, here.decode[0].cached_tokens = 3, 15
    _, _, body = await here.post(text())
    assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_what_needs_the_whole_prompt_where_it_is_decoded_takes_one_leg(site: Open) -> None:
    here = await site()
    status, _, _ = await here.post(text(echo=True))
    assert status == 200
    assert here.prefill[0].requests == []


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (text(model="nobody"), 404, "model", "model_not_found"),
        (text(n=0), 400, "n", 400),
        (text(n=1025), 400, "n", 400),
        (text(prompt=["a", 1]), 400, "prompt", 400),
        (text(prompt=["a", ""]), 400, "prompt", 400),
        (text(prompt=[[1], [[2]]]), 400, "prompt", 400),
        (text(prompt=["a"] * 1025), 400, "prompt", 400),
        (text(prompt=[]), 400, "prompt", 400),
        (text(prompt=""), 400, "prompt", 400),
        (text(prompt=7), 400, "prompt", 400),
        (text(prompt=[1, -1]), 400, "prompt", 400),
        (text(prompt=[1, 2**32]), 400, "prompt", 400),
        (text(prompt=None), 400, "prompt", 400),
        (text(stream="perhaps"), 400, "stream", 400),
        (text(stream_options={"include_usage": True}), 400, "stream_options", 400),
        (text(max_tokens=0), 400, "max_tokens", 400),
        (text(max_tokens="five"), 400, "max_tokens", 400),
        (text(max_tokens=4, min_tokens=5), 400, "min_tokens", 400),
        *((text(cache_salt=salt), 400, "cache_salt", 400) for salt in ("", 7, "a/b", "s" * 129)),
        (text(model=5), 400, "model", 400),
        (b'{"model": "m", "prompt": "a", "prompt": "b"}', 400, None, 400),
        (b'{"model": "m", "prompt": "a"', 400, None, 400),
        (b'["m"]', 400, None, 400),
        (b"", 400, None, 400),
        (b'{"model": "m", "prompt": "\xff"}', 400, None, 400),
    ],
)
async def test_what_is_wrong_is_refused_in_openais_shape(
    site: Open, body: Json | bytes, status: int, param: str | None, code: str | int
) -> None:
    here = await site()
    got, headers, answer = await here.post(body)
    error = json.loads(answer)["error"]
    assert got == status, error
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert headers["x-request-id"]
    assert here.prefill[0].requests == here.decode[0].requests == []


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user"}])
async def test_a_chat_needs_messages(site: Open, messages: object) -> None:
    here = await site()
    status, _, answer = await here.post(chat(messages=messages), "/v1/chat/completions")
    assert status == 400
    assert json.loads(answer)["error"]["param"] == "messages"


async def test_an_engines_own_refusal_is_the_clients_answer(site: Open) -> None:
    here = await site()
    status, headers, body = await here.post(text(temperature=3))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["param"] == "temperature"


async def test_the_models_of_all_engines_are_listed_once(site: Open) -> None:
    here = await site(2, 2)
    status, body = await here.get("/v1/models")
    assert status == 200
    (card,) = json.loads(body)["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", 4096)


async def test_a_request_that_names_no_model_means_the_only_one(site: Open) -> None:
    here = await site()
    body = text()
    del body["model"]
    body["ignore_eos"] = True
    status, _, answer = await here.post(body)
    assert status == 404  # the engine's own rule: our fake insists on a name
    assert json.loads(answer)["error"]["type"] == "NotFoundError"
    assert here.prefill[0].requests


async def test_metrics_tell_what_happened(site: Open) -> None:
    here = await site()
    await here.post(text())
    await here.post(text(stream=True))
    await here.post(text(n=0))
    status, body = await here.get("/metrics")
    lines = body.decode().splitlines()
    assert status == 200
    for line in (
        'kvrouter:request_success_total{finished_reason="length",model="m"} 2.0',
        'kvrouter:request_errors_total{code="400",model=""} 1.0',
        'kvrouter:generation_tokens_total{model="m"} 8.0',
        'kvrouter:time_to_first_token_seconds_count{model="m"} 2.0',
        'kvrouter:plans_total{why="prefill"} 2.0',
        "kvrouter:num_requests_running 0.0",
        f'kvrouter:worker_up{{engine="{here.decode[0].address}",role="decode"}} 1.0',
    ):
        assert line in lines


@pytest.mark.parametrize("settings", [{}, {"resume_streams": True}])
async def test_engines_cannot_make_series_of_metrics(site: Open, settings: Json) -> None:
    here = await site(0, 1, **settings)
    reasons = ["stop", "tool_calls", *(f"odd_{chr(97 + i)}" for i in range(9)), "x" * 99, 5, ["a"]]
    for stream in (False, True):
        for here.decode[0].reason in reasons:
            assert (await here.post(text(stream=stream, temperature=0)))[0] == 200
    page = (await here.get("/metrics"))[1].decode()
    counted = [row for row in page.splitlines() if row.startswith("kvrouter:request_success_total")]
    found = {row.partition('finished_reason="')[2].partition('"')[0] for row in counted}
    assert found <= {"stop", "tool_calls", "other", "unknown"}
    assert sum(float(row.rpartition(" ")[2]) for row in counted) == 2 * len(reasons)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stream": True}, {"prompt": ["a", "b"]}])
async def test_an_echo_of_a_prompt_without_an_answer_is_asked_of_the_engine(
    site: Open, more: Json
) -> None:
    here = await site()
    status, _, _ = await here.post(text(max_tokens=0, echo=True, **more))
    assert status == 200
    assert here.prefill[0].requests == []
    assert {sent["max_tokens"] for sent in here.decode[0].requests} == {0}


async def test_connections_to_engines_are_kept(site: Open) -> None:
    here = await site()
    for _ in range(5):
        await here.post(text())
        await here.post(text(stream=True))
    assert len(here.prefill[0].peers) == 1
    assert len(here.decode[0].peers) == 1


async def test_the_openai_client_works(site: Open) -> None:
    here = await site()
    async with openai.AsyncOpenAI(base_url=here.url("/v1"), api_key="k", max_retries=0) as client:
        whole = await client.completions.create(model="m", prompt="Hello", max_tokens=3)
        assert whole.choices[0].text == " t0 t1 t2"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 3
        ids = await client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=3)
        assert ids.usage is not None
        assert ids.usage.prompt_tokens == 3
        stream = await client.completions.create(
            model="m", prompt="Hello", max_tokens=3, stream=True
        )
        assert [part.choices[0].text async for part in stream] == [" t0", " t1", " t2"]
        talk = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=3
        )
        assert talk.choices[0].message.content == " t0 t1 t2"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nobody", prompt="Hello")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="m", prompt="Hello", n=0)
