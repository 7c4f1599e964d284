"""What another engine can go on with, and what a client sees of several engines' streams."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.request import Kind, parse
from kvrouter.openai.token_events import SentTokens
from kvrouter.serving.streaming.resume import resumable

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("more", "whether"),
    [
        ({}, True),
        ({"temperature": 0.0, "n": 1, "stop": None, "echo": False, "logprobs": None}, True),
        ({"temperature": 0.1}, True),
        ({"temperature": None}, True),
        ({"temperature": 0.1, "seed": 3}, False),
        ({"seed": 3}, True),
        ({"temperature": None, "seed": 3}, False),
        ({"logprobs": 1}, False),
        ({"logprobs": 0}, False),
        ({"best_of": 3}, True),
        ({"n": 2, "temperature": 1}, False),
        ({"stop": "x"}, False),
        ({"stream": False}, False),
        ({"presence_penalty": 1}, False),
        ({"return_token_ids": True}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"what_is_not_known": 1}, False),
    ],
)
def test_only_what_its_tokens_determine_is_resumed(more: Json, whether: bool) -> None:
    body = {"model": "m", "prompt": [1], "temperature": 0, "stream": True, **more}
    assert resumable(parse(json.dumps(body).encode(), "completion", 8)) is whether


@pytest.mark.parametrize(
    ("more", "whether"),
    [
        ({}, True),
        ({"max_completion_tokens": 3, "add_generation_prompt": True}, True),
        ({"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"logprobs": True}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tool_choice": "required"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"include_reasoning": False}, False),
        ({"echo": True}, False),
        ({"stop": "x"}, False),
    ],
)
def test_only_chats_of_plain_text_are_resumed(more: Json, whether: bool) -> None:
    message = {"role": "user", "content": "Hello"}
    body = {"model": "m", "messages": [message], "temperature": 0, "stream": True, **more}
    assert resumable(parse(json.dumps(body).encode(), "chat", 8)) is whether


def event(number: int, text: str, *, last: bool = False) -> bytes:
    reason = "length" if last else None
    choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [number]}
    return b"data: %b\n\n" % json.dumps({"id": "a", "choices": [choice]}).encode()


@given(st.lists(st.sampled_from(["", "x", "yz"]), max_size=20))
def test_tokens_whose_text_was_held_back_are_said_again(texts: list[str]) -> None:
    sent = SentTokens()
    sent.rewrite(b"".join(event(number, text) for number, text in enumerate(texts)))
    shown = max((number + 1 for number, text in enumerate(texts) if text), default=0)
    sent.resume()
    assert sent.tokens == list(range(shown))
    assert sent.earlier == shown


@given(st.lists(st.sampled_from(["", "x", "yz"]), min_size=1, max_size=20), st.data())
def test_a_client_that_asked_for_token_ids_is_told_each_once(
    texts: list[str], data: st.DataObject
) -> None:
    events = [event(n, text, last=n + 1 == len(texts)) for n, text in enumerate(texts)]
    cut = data.draw(st.integers(0, len(texts) - 1))
    sent = SentTokens(show_ids=True)
    seen = b"".join(map(sent.rewrite, events[:cut]))
    sent.resume()
    seen += b"".join(map(sent.rewrite, events[sent.earlier :]))
    told = [json.loads(line[6:])["choices"][0] for line in seen.split(b"\n\n") if line]
    assert [number for choice in told for number in choice["token_ids"]] == list(range(len(texts)))
    assert "".join(choice["text"] for choice in told) == "".join(texts)


def test_an_engine_that_does_not_name_its_tokens_is_not_followed() -> None:
    sent = SentTokens()
    sent.rewrite(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
    assert not sent.known


def test_an_engine_that_dies_after_its_last_token_owes_usage_and_the_end() -> None:
    sent = SentTokens()
    sent.rewrite(event(1, "a") + event(2, "b", last=True))
    assert sent.finish == "length"
    assert sent.missing_end(None) == b"data: [DONE]\n\n"
    owed, end, rest = sent.missing_end(7).split(b"\n\n")
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert json.loads(owed.removeprefix(b"data: ")) == {"id": "a", "choices": [], "usage": usage}
    assert (end, rest) == (b"data: [DONE]", b"")


def chunk(delta: Json, ids: list[int] | None = None, **more: Any) -> bytes:
    choice: Json = {"index": 0, "delta": delta, "finish_reason": None}
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: %b\n\n" % json.dumps({"id": "a", "choices": [choice], **more}).encode()


ROLE = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}],
)
def test_a_chat_that_has_said_more_than_text_is_not_followed(delta: Json) -> None:
    sent = SentTokens("chat")
    sent.rewrite(chunk(ROLE, prompt_token_ids=[1, 2]))
    sent.rewrite(chunk({"content": "a"}, [3]))
    assert sent.known
    sent.rewrite(chunk(delta, [4]))
    assert not sent.known


def test_a_role_is_said_once() -> None:
    sent = SentTokens("chat")
    assert json.loads(sent.rewrite(chunk(ROLE, prompt_token_ids=[1, 2]))[6:]) == {
        "id": "a",
        "choices": [{"index": 0, "delta": ROLE, "finish_reason": None}],
    }
    assert sent.prompt == b"[1,2]"
    sent.rewrite(chunk({"content": "a"}, [3]))
    sent.resume(b"[1,2,3]")
    assert sent.rewrite(chunk(ROLE, prompt_token_ids=[1, 2, 3])) == b""
    both = chunk({"role": "assistant", "content": "b"}, [4])
    assert b"role" not in sent.rewrite(both)
    assert (sent.tokens, sent.failure) == ([3, 4], None)


@pytest.mark.parametrize("told", [{"prompt_token_ids": [1, 2]}, {}])
def test_an_engine_that_does_not_go_on_from_the_tokens_it_was_given_is_not_believed(
    told: Json,
) -> None:
    sent = SentTokens("chat")
    sent.rewrite(chunk(ROLE, prompt_token_ids=[1, 2]) + chunk({"content": "a"}, [3]))
    sent.resume(b"[1, 2, 3]")
    assert sent.rewrite(chunk(ROLE, **told) + chunk({"content": "a"}, [3])) == b""
    assert sent.failure is not None
    assert sent.tokens == [3]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_error_of_the_engine_is_kept_from_the_client(kind: Kind) -> None:
    sent = SentTokens(kind)
    error = b'{"error": {"message": "EngineCore died", "code": 500}}'
    assert sent.rewrite(b"data: " + error + b"\n\ndata: [DONE]\n\n") == b""
    assert (sent.error, sent.done) == (error, False)
    assert sent.failure is not None


def test_an_error_is_the_clients_where_no_other_engine_goes_on() -> None:
    sent = SentTokens(resumes=False)
    error = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n'
    assert sent.rewrite(error) == error
    assert (sent.known, sent.done, sent.failure) == (False, True, None)


def test_an_error_of_the_request_is_the_clients() -> None:
    sent = SentTokens()
    error = b'data: {"error": {"message": "no", "code": 400}}\n\n'
    assert sent.rewrite(error) == error
    assert sent.failure is None


def test_an_engine_that_dies_after_the_end_mark_owes_nothing() -> None:
    sent = SentTokens()
    sent.rewrite(event(1, "a", last=True) + b"data: [DONE]\n\n")
    assert sent.missing_end(7) == b""


def test_cached_tokens_are_of_the_prompt() -> None:
    sent = SentTokens()
    sent.rewrite(event(1, "a") + event(2, "b"))
    sent.resume()
    details = {"cached_tokens": 9}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": details}
    last = sent.rewrite(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
    told = json.loads(last[6:])["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (7, 6)
    assert told["prompt_tokens_details"] == {"cached_tokens": 7}
