"""What Anthropic's and OpenAI's own clients get from a server: sdks.py BASE_URL. Prints JSON."""

import json
import sys
from typing import Any

import anthropic
import openai

SYSTEM = "You answer in one word. " * 20
OTHER_SYSTEM = "You use few words. " * 20
TURNS = [{"role": "user", "content": "Name a colour of the sky at noon."}]
MODEL, TOKENS = "tiny", 12
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}


def messages(client: anthropic.Anthropic) -> dict[str, Any]:
    """Answers of /v1/messages, whole and streamed, and its counts and errors."""
    asked: dict[str, Any] = {"model": MODEL, "system": SYSTEM, "messages": TURNS}
    tool = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
    drawn = {**asked, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**drawn)
    with client.messages.stream(**drawn) as stream:
        pieces = "".join(stream.text_stream)
    with_tools = client.messages.create(**drawn, tools=[tool])
    try:
        client.messages.create(**{**drawn, "model": "none"})
        error = ""
    except anthropic.NotFoundError as refused:
        error = f"{refused.body}"
    return {
        "whole": "".join(block.text for block in whole.content if block.type == "text"),
        "streamed": pieces,
        "tokens": whole.usage.output_tokens,
        "tools": [with_tools.stop_reason, with_tools.usage.output_tokens],
        "counted": client.messages.count_tokens(**asked).input_tokens,
        "not found": "not_found_error" in error or "NotFoundError" in error,
    }


def responses(client: openai.OpenAI) -> dict[str, Any]:
    """Answers of /v1/responses, whole and streamed."""
    asked: dict[str, Any] = {"model": MODEL, "instructions": OTHER_SYSTEM, "input": TURNS}
    drawn = {**asked, "max_output_tokens": TOKENS, "extra_body": {"temperature": 0}}
    whole = client.responses.create(**drawn)
    with client.responses.stream(**drawn) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    with_tools = client.responses.create(**drawn, tools=[tool])
    try:
        client.responses.create(**{**drawn, "model": "none"})
        missing = False
    except openai.NotFoundError:
        missing = True
    return {
        "whole": whole.output_text,
        "streamed": streamed.output_text,
        "events": [events[0], events[-1]],
        "tools": with_tools.output_text,
        "not found": missing,
    }


def main() -> None:
    """Ask in both ways."""
    url = sys.argv[1]
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120.0}
    found = {
        "messages": messages(anthropic.Anthropic(base_url=url, **own)),
        "responses": responses(openai.OpenAI(base_url=f"{url}/v1", **own)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
