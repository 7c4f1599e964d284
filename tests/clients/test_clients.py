"""Clients of other projects do what their users do: by both legs the same as before one engine."""

import pytest
from tests.clients.client import SCRIPTS
from tests.clients.conftest import Pair
from tests.fakes.patience import eventually

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


def clients_that(*steps: str) -> pytest.MarkDecorator:
    """Run a test for each client that can do one of the steps."""
    able = [script for script in SCRIPTS if set(steps) & set(script.steps)]
    return pytest.mark.parametrize(
        "client", able, ids=lambda s: s.name, indirect=True, scope="module"
    )


@clients_that("chat")
def test_a_chat_is_answered_and_counted(client: Pair) -> None:
    answer = client.do("chat")
    assert answer["text"]
    if (usage := answer.get("usage")) is not None:
        assert usage["input"] > 50
        assert usage["output"] == 12


@clients_that("stream")
def test_a_stream_brings_the_same_in_pieces(client: Pair) -> None:
    answer = client.do("chat")
    for one in (client.straight, client.routed):
        streamed = one.do("stream")
        assert len(streamed["pieces"]) > 1
        assert "".join(streamed["pieces"]).strip() == answer["text"].strip()
        assert streamed.get("usage") == answer.get("usage")


@clients_that("tool")
def test_a_forced_tool_is_called_as_its_schema_says(client: Pair) -> None:
    call = client.do("tool")
    assert call["name"] == "weather"
    assert is_weather(call["arguments"])


@clients_that("streamed_tool")
def test_a_forced_tool_is_called_in_a_stream(client: Pair) -> None:
    call = client.do("streamed_tool")
    assert call["name"] == "weather"
    assert is_weather(call["arguments"])


@clients_that("structured")
def test_an_answer_keeps_to_its_schema(client: Pair) -> None:
    assert is_weather(client.do("structured"))


@clients_that("unknown_model")
def test_an_unknown_model_raises_what_the_client_has_for_it(client: Pair) -> None:
    assert "none" in client.straight.do("unknown_model")
    assert "none" in client.routed.do("unknown_model")


@clients_that("cancelled")
def test_a_cancelled_stream_ends_on_its_engine(client: Pair) -> None:
    prefill, decode = client.fleet.aborted()
    assert client.do("cancelled") is True
    assert eventually(client.fleet.rests, patience_s=10.0)
    assert client.fleet.aborted() == (prefill, decode + 1)


@clients_that("timed_out")
def test_a_client_that_waits_no_longer_ends_the_prefill(client: Pair) -> None:
    prefill, decode = client.fleet.aborted()
    assert client.do("timed_out") is True
    assert eventually(client.fleet.rests, patience_s=10.0)
    assert client.fleet.aborted() == (prefill + 1, decode)


@clients_that("chat", "tool")
def test_the_prompt_goes_by_both_legs(client: Pair) -> None:
    client.do(client.script.steps[0])
    assert client.fleet.landed() > client.landed_before


def is_weather(found: dict[str, object]) -> bool:
    """Whether an object fits the schema that all clients send."""
    types = {name: type(each) for name, each in found.items()}
    return types == {"city": str, "celsius": int}
