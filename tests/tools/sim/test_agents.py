"""What clients of tools, schemas, messages and responses get from a simulated engine."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.sim.settings import SimSettings

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
    "required": ["place"],
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: Any = [{"role": "user", "content": "Will it rain?"}]


class Order(BaseModel):
    """What a client wants to have."""

    names: list[str]
    count: int
    next: "Order | None" = None


@pytest.fixture(scope="module")
def sim() -> Iterator[LiveSim]:
    with LiveSim(SimSettings(model="tiny", port=0, block_size=16)) as live:
        yield live


@pytest.fixture(scope="module")
def client(sim: LiveSim) -> openai.OpenAI:
    url = f"http://127.0.0.1:{sim.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)


def ask(sim: LiveSim, path: str, **body: Any) -> tuple[int, Any]:
    status, answer = sim.ask("POST", path, json.dumps({"model": "tiny", **body}).encode())
    return status, answer if body.get("stream") else json.loads(answer)


def prompt_tokens(message: Any) -> int:
    usage = message["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def named_events(stream: bytes) -> list[Any]:
    """The events of a stream in which each says its type twice."""
    found = [one.split("\n") for one in stream.decode().strip().split("\n\n")]
    said = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in found]
    assert all(name == data["type"] for name, data in said)
    return [data for _, data in said]


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_forced_call_has_arguments_that_fit(
    client: openai.OpenAI, choice: Any, reason: str
) -> None:
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": choice}
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["days"] <= 7
    assert whole.finish_reason == reason
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == reason


def test_tools_that_need_not_be_called_are_not(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_tools_and_calls_are_part_of_the_prompt(sim: LiveSim) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    later = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    counts = [
        ask(sim, "/v1/chat/completions", max_tokens=1, **body)[1]["usage"]["prompt_tokens"]
        for body in ({"messages": ASKED}, {"messages": ASKED, "tools": TOOLS}, {"messages": later})
    ]
    assert counts[1] > counts[0] + 50
    assert counts[2] > counts[0] + 30
    tokenized = ask(sim, "/tokenize", messages=ASKED, tools=TOOLS)[1]
    assert tokenized["count"] == counts[1]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": "?"}}},
        {"structured_outputs": {"json": "?"}},
    ],
    ids=["response_format", "structured_outputs"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_fits_the_schema_that_a_request_names(
    sim: LiveSim, path: str, body: dict[str, Any]
) -> None:
    schema = Order.model_json_schema()
    body = json.loads(json.dumps(body).replace('"?"', json.dumps(schema)))
    prompt = {"messages": ASKED} if "chat" in path else {"prompt": "An order."}
    (choice,) = ask(sim, path, max_tokens=2000, **prompt, **body)[1]["choices"]
    Order.model_validate_json(choice["message"]["content"] if "chat" in path else choice["text"])
    assert choice["finish_reason"] == "stop"


def test_a_json_object_is_one(sim: LiveSim) -> None:
    body = {"messages": ASKED, "response_format": {"type": "json_object"}}
    (choice,) = ask(sim, "/v1/chat/completions", **body)[1]["choices"]
    assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_an_answer_that_is_cut_off_is_no_whole_json(sim: LiveSim) -> None:
    body = {"messages": ASKED, "response_format": {"type": "json_object"}, "max_tokens": 2}
    (choice,) = ask(sim, "/v1/chat/completions", **body)[1]["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) <= 4


@pytest.mark.parametrize(
    "body",
    [
        {"tools": []},
        {"tools": [{"type": "function"}]},
        {"tools": TOOLS, "tool_choice": "perhaps"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
        {"response_format": {"type": "structural_tag", "format": {}}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "a+"}},
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_form_that_is_none_or_unknown_is_refused(sim: LiveSim, body: dict[str, Any]) -> None:
    status, answer = ask(sim, "/v1/chat/completions", messages=ASKED, **body)
    assert status == 400
    assert answer["error"]["type"] == "BadRequestError"


def test_messages_say_in_a_stream_what_they_say_at_once(sim: LiveSim) -> None:
    body = {"messages": ASKED, "system": "Be brief.", "max_tokens": 6}
    whole = ask(sim, "/v1/messages", **body)[1]
    events = named_events(ask(sim, "/v1/messages", stream=True, **body)[1])
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", *["content_block_delta"] * 6),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    text = "".join(event["delta"]["text"] for event in events[2:8])
    assert whole["content"] == [{"type": "text", "text": text}]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"] == 6
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 10


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_messages_call_a_tool_that_they_must(sim: LiveSim, choice: Any) -> None:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    body = {"messages": ASKED, "max_tokens": 200, "tools": tools, "tool_choice": choice}
    whole = ask(sim, "/v1/messages", **body)[1]
    assert whole["stop_reason"] == "tool_use"
    (used,) = whole["content"]
    assert used["type"] == "tool_use"
    assert used["input"]["days"] <= 7
    events = named_events(ask(sim, "/v1/messages", stream=True, **body)[1])
    parts = [event["delta"]["partial_json"] for event in events if "partial" in str(event)]
    assert json.loads("".join(parts)) == used["input"]
    answered = {"type": "tool_result", "tool_use_id": used["id"], "content": "Yes."}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
    later = ask(sim, "/v1/messages", **{**body, "messages": [*ASKED, *turns], "tool_choice": None})
    assert prompt_tokens(later[1]) > prompt_tokens(whole) + 10


def test_errors_of_messages_are_anthropics(sim: LiveSim) -> None:
    for body, status, kind in (
        ({"messages": ASKED}, 400, "invalid_request_error"),
        ({"messages": ASKED, "max_tokens": 1, "model": "none"}, 404, "not_found_error"),
    ):
        answered, error = ask(sim, "/v1/messages", **body)
        assert (answered, error["type"], error["error"]["type"]) == (status, "error", kind)


def test_responses_say_in_a_stream_what_they_say_at_once(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": ASKED, "instructions": "Be brief."}
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert streamed.output_text == whole.output_text != ""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith("text.delta")] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", "response.completed"),
    ]


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3


def test_responses_call_a_function_that_they_must_and_take_its_result(
    client: openai.OpenAI,
) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    asked: Any = {"model": "tiny", "input": ASKED, "tools": tools, "tool_choice": "required"}
    (called,) = client.responses.create(**asked).output
    assert called.type == "function_call"
    assert json.loads(called.arguments)["days"] <= 7
    with client.responses.stream(**asked) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == called.arguments
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "Yes."}
    turns = [*ASKED, called.model_dump(), result]
    assert client.responses.create(model="tiny", input=turns, tools=tools).output_text


def test_a_response_is_parsed_as_its_type(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input=ASKED, text_format=Order).output_parsed
    assert isinstance(parsed, Order)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {}),
        ("/v1/responses", {"input": [7]}),
        ("/v1/responses", {"input": "hello", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "hello", "tools": [7]}),
        ("/v1/messages", {"max_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1, "messages": ASKED, "tools": [{"name": 7}]}),
    ],
)
def test_what_agents_send_wrong_is_refused(sim: LiveSim, path: str, body: dict[str, Any]) -> None:
    assert ask(sim, path, **body)[0] == 400


def test_it_lists_its_endpoints(sim: LiveSim) -> None:
    paths = json.loads(sim.ask("GET", "/openapi.json")[1])["paths"]
    for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions", "/tokenize"):
        assert "post" in paths[path]
    assert "/v1/embeddings" not in paths


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": ASKED, "system": "Be brief.", "max_tokens": 4}),
        ("/v1/responses", {"input": "Will it rain?", "instructions": "Be brief."}),
    ],
)
def test_an_engine_that_scales_out_renders_the_prompt_that_it_computes(
    path: str, asked: dict[str, Any]
) -> None:
    with LiveSim(SimSettings(model="tiny", port=0, enable_scale_out=True)) as sim:
        _, rendered = ask(sim, f"{path}/render", **asked)
        _, answer = ask(sim, path, **asked)
        listed = json.loads(sim.ask("GET", "/openapi.json")[1])["paths"]
        assert ask(sim, f"{path}/render", **{**asked, "model": "none"})[0] == 404
    assert len(rendered["token_ids"]) == answer["usage"]["input_tokens"] > 8
    assert rendered["features"] is None
    assert f"{path}/render" in listed


def test_an_engine_renders_nothing_unless_it_scales_out(sim: LiveSim) -> None:
    assert ask(sim, "/v1/responses/render", input="Will it rain?")[0] == 404
