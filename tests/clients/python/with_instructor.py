# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor==1.17.0"]
# ///
"""Gets objects with Instructor."""

from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel
from steps import serve

server = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
by_tool = instructor.from_openai(server, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


ASKED: dict[str, Any] = {
    "model": "sim",
    "messages": [
        {"role": "system", "content": "You are the weather desk of a lighthouse. " * 10},
        {"role": "user", "content": "Will it rain in Oslo?"},
    ],
    "response_model": Weather,
    "max_retries": 1,
    "temperature": 0,
}


def tool() -> object:
    return {"name": "weather", "arguments": by_tool.create(**ASKED).model_dump()}


def structured() -> object:
    return by_schema.create(**ASKED).model_dump()


def streamed_tool() -> object:
    *_, whole = by_tool.create_partial(**ASKED)
    return {"name": "weather", "arguments": whole.model_dump()}


def unknown_model() -> object:
    try:
        by_tool.create(**{**ASKED, "model": "none"})
    except InstructorRetryException as error:
        return str(error)
    return None


serve(tool, structured, streamed_tool, unknown_model)
