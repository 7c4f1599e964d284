# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.57.0"]
# ///
"""Asks for responses with OpenAI's client."""

import json
from typing import Any

import openai
from pydantic import BaseModel
from steps import serve

client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY

ASKED: dict[str, Any] = {
    "model": "sim",
    "instructions": "You are the weather desk of a harbour. " * 10,
    "input": "Will it rain in Oslo?",
    "temperature": 0,
}


class Weather(BaseModel):
    """What an answer has to be."""

    city: str
    celsius: int


def chat() -> object:
    response = client.responses.create(**ASKED, max_output_tokens=12)
    return {"text": response.output_text, "usage": used(response.usage)}


def stream() -> object:
    with client.responses.stream(**ASKED, max_output_tokens=12) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        response = events.get_final_response()
    return {"pieces": pieces, "usage": used(response.usage)}


def tool() -> object:
    function: Any = openai.pydantic_function_tool(Weather, name="weather")["function"]
    forced: Any = {"type": "function", "name": "weather"}
    response = client.responses.create(
        **ASKED, tools=[{"type": "function", **function}], tool_choice=forced
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def structured() -> object:
    response = client.responses.parse(**ASKED, text_format=Weather)
    return response.output_parsed.model_dump()


def unknown_model() -> object:
    try:
        client.responses.create(**{**ASKED, "model": "none"})
    except openai.NotFoundError as error:
        return error.message
    return None


def cancelled() -> object:
    events = client.responses.create(**ASKED, max_output_tokens=2000, stream=True)
    for event in events:
        if event.type == "response.output_text.delta":
            events.close()
            return True
    return False


def used(usage: Any) -> object:
    return {"input": usage.input_tokens, "output": usage.output_tokens}


serve(chat, stream, tool, structured, unknown_model, cancelled)
