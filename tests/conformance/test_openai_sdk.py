"""OpenAI's own client, unchanged, against the router over simulated engines."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.conformance.conftest import Routed

PROMPT = "Hello, you there"
HELLO: Any = [{"role": "user", "content": PROMPT}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "town", "schema": {"type": "object"}, "strict": True},
}
MORE: Any = {"ignore_eos": True}


@pytest.fixture
def client(routed: Routed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="k", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture
async def aclient(routed: Routed) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{routed.url}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt=PROMPT, max_tokens=5, extra_body=MORE)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5
    stream = client.completions.create(
        model="m",
        prompt=PROMPT,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=MORE,
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert last.usage == whole.usage


def test_token_ids(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=3, extra_body=MORE)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", [["a b", "c d e"], [[5, 6, 7], [8, 9]]])
def test_lists_of_prompts_and_samples(client: openai.OpenAI, prompt: Any) -> None:
    asked: Any = {"model": "m", "prompt": prompt, "n": 2, "max_tokens": 3, "extra_body": MORE}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    said = ["", "", "", ""]
    for part in client.completions.create(**asked, stream=True):
        for choice in part.choices:
            said[choice.index] += choice.text
    assert said == [choice.text for choice in whole.choices]


def test_chats(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="m", messages=HELLO, max_completion_tokens=5, seed=1, extra_body=MORE
    )
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model="m", messages=HELLO, max_completion_tokens=5, seed=1, stream=True, extra_body=MORE
    )
    said = "".join(part.choices[0].delta.content or "" for part in stream)
    assert said == whole.choices[0].message.content


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
        {"response_format": SCHEMA},
        {"stop": ["\n"], "temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.1},
        {"extra_headers": {"x-request-id": "mine"}, "user": "u", "metadata": {"a": "b"}},
    ],
)
def test_what_a_request_may_carry(client: openai.OpenAI, more: Any) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=3, **more)
    assert answer.choices[0].message.role == "assistant"


def test_what_is_wrong_raises_what_openai_raises(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="m", prompt=PROMPT, max_tokens=0)
    assert wrong.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="a")  # simulated engines have none
    with pytest.raises(openai.BadRequestError) as kept:
        client.responses.create(model="m", input="a", previous_response_id="resp_1")
    assert kept.value.param == "previous_response_id"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/nobody")


async def test_the_asynchronous_client(aclient: openai.AsyncOpenAI) -> None:
    whole = await aclient.chat.completions.create(
        model="m", messages=HELLO, max_tokens=5, extra_body=MORE
    )
    stream = await aclient.chat.completions.create(
        model="m", messages=HELLO, max_tokens=5, stream=True, extra_body=MORE
    )
    said = "".join([part.choices[0].delta.content or "" async for part in stream])
    assert said == whole.choices[0].message.content


async def test_a_stream_that_is_left_early_leaves_nothing_behind(
    aclient: openai.AsyncOpenAI,
) -> None:
    stream = await aclient.completions.create(
        model="m", prompt=PROMPT, max_tokens=200, stream=True, extra_body=MORE
    )
    async for _ in stream:
        break
    await stream.close()
