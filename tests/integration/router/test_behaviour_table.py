"""What peers do wrong when things break, row by row, and what this router does instead.

The peers (sglang-router 0.3.2, vllm-router 0.1.17, vLLM's example proxies) were run against a mock
engine; each test is named after a row.
"""

import asyncio
import json

import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Json, Open, Site, chat, text

from kvrouter.engines.engine import Role

STREAM = {"stream": True}


async def joined(here: Site, role: Role, count: int) -> None:
    await until(lambda: len(here.app.core.pool.engines(role)) == count)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_answers_500(site: Open, stream: bool) -> None:
    """Peers: 5 tries, then 500. Here: the decode engine computes, 200, one try."""
    here = await site()
    here.prefill[0].mode = "500"
    status, _, body = await here.post(text(stream=stream))
    assert status == 200
    assert b" t3" in body
    assert len(here.prefill[0].requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_drops_the_connection(site: Open, stream: bool) -> None:
    """Peers: 5 tries, then 502; or 500 in plain text. Here: 200."""
    here = await site()
    here.prefill[0].mode = "drop"
    status, _, body = await here.post(text(stream=stream))
    assert status == 200
    assert b" t3" in body


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_answers_500(site: Open, stream: bool) -> None:
    """Peers: 200 with an empty or broken body, or an error that is not JSON."""
    here = await site(1, 2)
    here.decode[0].mode = "500"
    for _ in range(2):
        status, _, body = await here.post(text(stream=stream))
        assert status == 200
        assert b" t3" in body
    here.decode[1].mode = "500"
    status, headers, body = await here.post(text(stream=stream))
    assert (status, headers["content-type"]) == (500, "application/json")
    assert json.loads(body)["error"] == {"message": "CUDA error", "code": 500}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_engine_hangs(site: Open, leg: str) -> None:
    """Peers: wait for 1,800 s. Here: for the deadline, and the engine sees its client leave."""
    here = await site(request_timeout_s=0.3)
    engine = {"prefill": here.prefill, "decode": here.decode}[leg][0]
    engine.mode = "hang"
    assert (await here.post(text()))[0] == 504
    await engine.next_left()


async def test_decode_dies_mid_stream(site: Open) -> None:
    """Peers: the stream is cut, without an error event. Here: an error event, then the end mark."""
    here = await site()
    here.decode[0].mode = "drop_mid"
    status, _, body = await here.post(text(**STREAM))
    *_, error, done, rest = body.decode().split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502


async def test_client_leaves_mid_stream(site: Open) -> None:
    """Peers: noticed only at the next token. Here: at once, though no token comes."""
    here = await site()
    here.decode[0].mode = "hang_mid"
    task = asyncio.create_task(here.post(text(**STREAM)))
    await here.decode[0].next_began()
    task.cancel()
    await here.decode[0].next_left()


async def test_client_leaves_during_prefill(site: Open) -> None:
    """Peers: decode has been called already. Here: it is not, and prefill ends."""
    here = await site()
    here.prefill[0].mode = "hang"
    task = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    task.cancel()
    await here.prefill[0].next_left()
    assert here.decode[0].requests == []


async def test_engines_gone_then_back(site: Open) -> None:
    """Peers: the breaker stays open for 60 s. Here: as soon as they answer a probe."""
    here = await site()
    for engine in (*here.prefill, *here.decode):
        await engine.stop()
    await joined(here, Role.DECODE, 0)
    assert (await here.post(text()))[0] == 503
    for engine in (*here.prefill, *here.decode):
        await engine.start()
    await joined(here, Role.DECODE, 1)
    await joined(here, Role.PREFILL, 1)
    assert (await here.post(text()))[0] == 200
    assert len(here.prefill[0].requests) == 1


async def test_token_id_prompts(site: Open) -> None:
    """Peers: 422."""
    here = await site()
    status, _, body = await here.post(text(prompt=[5, 6, 7]))
    assert (status, json.loads(body)["usage"]["prompt_tokens"]) == (200, 3)


async def test_unknown_model(site: Open) -> None:
    """Peers: forwarded to engines. Here: OpenAI's 404."""
    here = await site()
    status, _, body = await here.post(text(model="nobody"))
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    assert here.prefill[0].requests == []


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"model": ', {}, 400),
        (b'["model"]', {}, 400),
        (json.dumps(text()).encode(), {"content-type": "text/plain"}, 200),
    ],
    ids=["bad JSON", "list", "wrong type"],
)
async def test_bad_json_list_wrong_type(
    site: Open, body: bytes, headers: dict[str, str], status: int
) -> None:
    """Peers: 400, 422 and 415, or 500 for all. Here: JSON is judged by what it is."""
    here = await site()
    got, _, answer = await here.post(body, **headers)
    assert got == status
    assert status == 200 or json.loads(answer)["error"]["type"] == "BadRequestError"


async def test_clients_authorization(site: Open) -> None:
    """Peers: dropped, or replaced by "Bearer None"."""
    here = await site()
    await here.post(text(), authorization="Bearer mine")
    for engine in (*here.prefill, *here.decode):
        assert engine.headers[0]["authorization"] == "Bearer mine"
    await here.post(text())
    for engine in (*here.prefill, *here.decode):
        assert "authorization" not in engine.headers[1]


async def test_clients_x_request_id(site: Open) -> None:
    """Peers: replaced or dropped. Here: on both legs and in the answer."""
    here = await site()
    _, headers, _ = await here.post(text(), **{"x-request-id": "mine"})
    assert headers["x-request-id"] == "mine"
    for engine in (*here.prefill, *here.decode):
        assert engine.headers[0]["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("more", "legs"),
    [({"n": 1}, 2), ({"best_of": 3}, 2), ({"logprobs": 2}, 2), ({"echo": True}, 1)],
)
async def test_n_best_of_echo_logprobs_on_the_prefill_leg(
    site: Open, more: Json, legs: int
) -> None:
    """Peers: kept, so that engines refuse or do the work twice. Here: not on that leg."""
    here = await site()
    status, _, _ = await here.post(text(**more))
    assert status == 200
    assert len(here.prefill[0].requests) == legs - 1
    for sent in here.prefill[0].requests:
        assert more.keys().isdisjoint(sent)
    assert here.decode[0].requests[0] | more == here.decode[0].requests[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_transfer_params(site: Open, stream: bool) -> None:
    """Peers: leak to the client."""
    here = await site()
    for engine in (*here.prefill, *here.decode):
        engine.manifest = "ab" * 32
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for body, path in ((text(**options), "/v1/completions"), (chat(), "/v1/chat/completions")):
        status, _, answer = await here.post(body, path)
        assert status == 200
        assert b"kv_transfer_params" not in answer
