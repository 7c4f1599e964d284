# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""Runs an agent of Pydantic AI."""

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ModelNotFoundError, NativeOutput
from steps import serve

PROMPT = "Will it rain in Oslo?"


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


def agent(model: str = "sim", max_tokens: int | None = None, **more: Any) -> Any:
    settings: Any = {"temperature": 0} | ({"max_tokens": max_tokens} if max_tokens else {})
    return Agent(
        f"openai-chat:{model}",  # the server: OPENAI_BASE_URL, OPENAI_API_KEY
        instructions="You are the weather desk of a glider club. " * 10,
        model_settings=settings,
        **more,
    )


async def chat() -> object:
    result = await agent(max_tokens=12).run(PROMPT)
    return {"text": result.output, "usage": used(result.usage)}


async def stream() -> object:
    async with agent(max_tokens=12).run_stream(PROMPT) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return {"pieces": pieces, "usage": used(result.usage)}


async def tool() -> object:
    """Output types are tools that the model must call."""
    result = await agent(output_type=Weather).run(PROMPT)
    return {"name": "weather", "arguments": result.output.model_dump()}


async def structured() -> object:
    return (await agent(output_type=NativeOutput(Weather)).run(PROMPT)).output.model_dump()


async def unknown_model() -> object:
    try:
        await agent("none").run(PROMPT)
    except ModelNotFoundError as error:
        return error.message
    return None


async def cancelled() -> object:
    async with agent(max_tokens=2000).run_stream(PROMPT) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            await result.cancel()
            return True
    return False


def used(usage: Any) -> object:
    return {"input": usage.input_tokens, "output": usage.output_tokens}


serve(chat, stream, tool, structured, unknown_model, cancelled)
