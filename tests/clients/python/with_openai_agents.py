# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""Runs an agent of OpenAI's Agents SDK, over chats as with any server that is not OpenAI's own."""

from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel
from steps import serve

set_default_openai_api("chat_completions")  # the server: OPENAI_BASE_URL, OPENAI_API_KEY
set_tracing_disabled(True)

INPUT = "Will it rain in Oslo?"
calls = []


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


@function_tool
def weather(city: str, celsius: int) -> str:
    """Note the weather of a city."""
    calls.append({"city": city, "celsius": celsius})
    return "noted"


def agent(max_tokens: int | None = None, **more: Any) -> Agent:
    own: dict[str, Any] = {
        "name": "Desk",
        "instructions": "You are the weather desk of a ferry. " * 10,
        "model": "sim",
        "model_settings": ModelSettings(temperature=0, max_tokens=max_tokens, include_usage=True),
    }
    return Agent(**own | more)


async def chat() -> object:
    result = await Runner.run(agent(12), INPUT)
    return {"text": result.final_output, "usage": used(result)}


async def stream() -> object:
    result = Runner.run_streamed(agent(12), INPUT)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return {"pieces": pieces, "usage": used(result)}


async def tool() -> object:
    """The model calls the tool, gets what that returns, and answers."""
    calls.clear()
    forced = ModelSettings(temperature=0, tool_choice="weather")
    result = await Runner.run(agent(model_settings=forced, tools=[weather]), INPUT)
    (call,) = calls
    return {"name": "weather", "arguments": call, "answered": result.final_output != ""}


async def structured() -> object:
    return (await Runner.run(agent(output_type=Weather), INPUT)).final_output.model_dump()


async def unknown_model() -> object:
    try:
        await Runner.run(agent(model="none"), INPUT)
    except openai.NotFoundError as error:
        return error.message
    return None


async def cancelled() -> object:
    result = Runner.run_streamed(agent(2000), INPUT)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and "delta" in event.data.type:
            result.cancel()
            return True
    return False


def used(result: Any) -> object:
    usage = result.context_wrapper.usage
    return {"input": usage.input_tokens, "output": usage.output_tokens}


serve(chat, stream, tool, structured, unknown_model, cancelled)
