"""Engines of TensorRT-LLM, which look like vLLM and refuse what only vLLM knows."""

import json

import pytest
from tests.fakes.tensorrt_llm import TensorRtLlmEngine
from tests.integration.router.conftest import Json, Open, chat, text
from tests.integration.router.test_passthrough import RESPONSES, offer, saying

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("asked", [text(), text(stream=True), chat(), chat(stream=True)])
@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
async def test_its_requests_have_the_clients_members_alone(
    site: Open, asked: Json, policy: str
) -> None:
    here = await site(
        0, 2, kind=TensorRtLlmEngine, kv_connector="auto", policy=policy, resume_streams=True
    )
    status, _, _ = await here.post(asked, CHAT if "messages" in asked else "/v1/completions")
    assert status == 200
    assert [body for engine in here.decode for body in engine.requests] == [asked]


async def test_a_member_that_it_refuses_is_the_clients_400(site: Open) -> None:
    here = await site(0, 1, kind=TensorRtLlmEngine, kv_connector="auto")
    status, _, answer = await here.post(text(made_up=1))
    assert (status, "made_up" in json.loads(answer)["error"]) == (400, True)


@pytest.mark.parametrize(
    "told",
    [
        {"error": "no such field"},
        {"object": "error", "message": "no such field", "type": "BadRequestError", "code": 400},
    ],
)
async def test_its_errors_become_openais(site: Open, told: Json) -> None:
    here = await site(0, 1, kind=TensorRtLlmEngine, kv_connector="auto")
    offer(here.decode, saying(400, told))
    status, _, answer = await here.post({"model": "m", "input": "a"}, RESPONSES)
    error = json.loads(answer)["error"]
    assert (status, error["message"], error["code"]) == (400, "no such field", 400)
