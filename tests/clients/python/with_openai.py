# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.57.0"]
# ///
"""Chats with OpenAI's client."""

import json
from typing import Any

import openai
from pydantic import BaseModel
from steps import serve

client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY

ASKED: dict[str, Any] = {
    "model": "sim",
    "messages": [
        {"role": "developer", "content": "You are the weather desk of an airport. " * 10},
        {"role": "user", "content": "Will it rain in Oslo?"},
    ],
    "temperature": 0,
}


class Weather(BaseModel):
    """What an answer has to be."""

    city: str
    celsius: int


TOOL = openai.pydantic_function_tool(Weather, name="weather")


def chat() -> object:
    completion = client.chat.completions.create(**ASKED, max_completion_tokens=12)
    return {"text": completion.choices[0].message.content, "usage": used(completion.usage)}


def stream() -> object:
    options: Any = {"include_usage": True}
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        **ASKED, max_completion_tokens=12, stream=True, stream_options=options
    ):
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = chunk.usage or usage
    return {"pieces": pieces, "usage": used(usage)}


def tool() -> object:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    completion = client.chat.completions.create(**ASKED, tools=[TOOL], tool_choice=forced)
    (call,) = completion.choices[0].message.tool_calls
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def streamed_tool() -> object:
    with client.chat.completions.stream(**ASKED, tools=[TOOL], tool_choice="required") as events:
        completion = events.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls
    return {"name": call.function.name, "arguments": call.function.parsed_arguments.model_dump()}


def structured() -> object:
    completion = client.chat.completions.parse(**ASKED, response_format=Weather)
    return completion.choices[0].message.parsed.model_dump()


def unknown_model() -> object:
    try:
        client.chat.completions.create(**{**ASKED, "model": "none"})
    except openai.NotFoundError as error:
        return error.message
    return None


def cancelled() -> object:
    chunks = client.chat.completions.create(**ASKED, max_completion_tokens=2000, stream=True)
    for chunk in chunks:
        if chunk.choices[0].delta.content:
            chunks.close()
            return True
    return False


def timed_out() -> object:
    long: Any = [{"role": "user", "content": "Will it rain? " * 1000}]
    try:
        client.with_options(timeout=3, max_retries=0).chat.completions.create(
            **{**ASKED, "messages": long}
        )
    except openai.APITimeoutError:
        return True
    return False


def used(usage: Any) -> object:
    return {"input": usage.prompt_tokens, "output": usage.completion_tokens}


if __name__ == "__main__":
    serve(chat, stream, tool, streamed_tool, structured, unknown_model, cancelled, timed_out)
