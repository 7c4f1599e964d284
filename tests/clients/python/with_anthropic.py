# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0"]
# ///
"""Sends messages with Anthropic's client."""

from typing import Any

import anthropic
from steps import serve

client = anthropic.Anthropic()  # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY

ASKED: dict[str, Any] = {
    "model": "sim",
    "system": "You are the weather desk of a mountain hut. " * 10,
    "messages": [{"role": "user", "content": "Will it rain in Oslo?"}],
    "extra_body": {"temperature": 0},
}
TOOL: Any = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "celsius": {"type": "integer"}},
        "required": ["city", "celsius"],
    },
}


def chat() -> object:
    message = client.messages.create(**ASKED, max_tokens=12)
    return {"text": message.content[0].text, "usage": used(message.usage)}


def stream() -> object:
    with client.messages.stream(**ASKED, max_tokens=12) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    return {"pieces": pieces, "usage": used(message.usage)}


def tool() -> object:
    forced: Any = {"type": "tool", "name": "weather"}
    message = client.messages.create(**ASKED, max_tokens=200, tools=[TOOL], tool_choice=forced)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    return {"name": call.name, "arguments": call.input}


def streamed_tool() -> object:
    with client.messages.stream(
        **ASKED, max_tokens=200, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        message = stream.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    return {"name": call.name, "arguments": call.input}


def unknown_model() -> object:
    try:
        client.messages.create(**{**ASKED, "model": "none"}, max_tokens=12)
    except anthropic.NotFoundError as error:
        return error.body["error"]["message"]
    return None


def cancelled() -> object:
    with client.messages.stream(**ASKED, max_tokens=2000) as stream:
        return bool(next(stream.text_stream))


def timed_out() -> object:
    long = [{"role": "user", "content": "Will it rain? " * 1000}]
    try:
        client.with_options(timeout=3, max_retries=0).messages.create(
            **{**ASKED, "messages": long}, max_tokens=12
        )
    except anthropic.APITimeoutError:
        return True
    return False


def used(usage: Any) -> object:
    cached = usage.cache_read_input_tokens or 0
    return {"input": usage.input_tokens + cached, "output": usage.output_tokens}


serve(chat, stream, tool, streamed_tool, unknown_model, cancelled, timed_out)
