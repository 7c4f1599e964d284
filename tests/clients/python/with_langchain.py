# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai==1.7.4"]
# ///
"""Asks LangChain's chat model of OpenAI's servers."""

from typing import Any

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import serve

model = ChatOpenAI(model="sim", temperature=0)  # OPENAI_BASE_URL and OPENAI_API_KEY
short = model.model_copy(update={"max_tokens": 12})

TURNS = [
    ("system", "You are the weather desk of a railway. " * 10),
    ("human", "Will it rain in Oslo?"),
]


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


def chat() -> object:
    message = short.invoke(TURNS)
    return {"text": message.text, "usage": used(message.usage_metadata)}


def stream() -> object:
    chunks = list(short.stream(TURNS, stream_usage=True))
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    return {"pieces": [chunk.text for chunk in chunks if chunk.text], "usage": used(usage[-1])}


def tool() -> object:
    (call,) = model.bind_tools([Weather], tool_choice="Weather").invoke(TURNS).tool_calls
    return {"name": call["name"].lower(), "arguments": call["args"]}


def structured() -> object:
    return model.with_structured_output(Weather).invoke(TURNS).model_dump()


def unknown_model() -> object:
    try:
        ChatOpenAI(model="none").invoke(TURNS)
    except openai.NotFoundError as error:
        return error.message
    return None


def cancelled() -> object:
    chunks = model.bind(max_tokens=2000).stream(TURNS)
    for chunk in chunks:
        if chunk.text:
            chunks.close()
            return True
    return False


def used(usage: Any) -> object:
    return {"input": usage["input_tokens"], "output": usage["output_tokens"]}


serve(chat, stream, tool, structured, unknown_model, cancelled)
