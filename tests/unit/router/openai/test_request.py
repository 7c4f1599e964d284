"""Reading requests, and tidying answers, without a socket."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ApiError
from kvrouter.openai.request import MAX_SALT_CHARACTERS, parse
from kvrouter.openai.response import answer_usage, tidy_answer

Json = dict[str, Any]

ANSWER: Json = {
    "id": "cmpl-1",
    "choices": [{"text": 'say "finish_reason": "lie"', "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2},
}
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=5))

MEMBERS = (
    *("model", "prompt", "messages", "stream", "stream_options", "n", "best_of"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "cache_salt"),
)


def compact(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("write", [compact, lambda value: json.dumps(value).encode()])
@pytest.mark.parametrize("last", [True, False])
def test_transfer_parameters_are_left_out_wherever_they_stand(write: Any, last: bool) -> None:
    told = {"kv_transfer_params": {"kvstore": {"blocks": 2, "text": "}"}}}
    body = write({**ANSWER, **told} if last else {**told, **ANSWER})
    assert json.loads(tidy_answer(body, None)) == ANSWER


def test_an_answer_without_anything_to_tidy_is_not_touched() -> None:
    body = compact(ANSWER)
    assert tidy_answer(body, 3) is body


def test_text_that_looks_like_transfer_parameters_stays() -> None:
    choice = {"text": 'x,"kv_transfer_params":{"a":1}}', "finish_reason": "stop"}
    body = compact({**ANSWER, "choices": [choice]})
    assert tidy_answer(body, None) is body


@pytest.mark.parametrize("cached", [0, 1, 4, 12345])
@pytest.mark.parametrize("more", [{}, {"audio_tokens": None}])
def test_cached_tokens_are_replaced_where_they_are_told(cached: int, more: Json) -> None:
    usage = {**ANSWER["usage"], "prompt_tokens_details": {**more, "cached_tokens": 4}}
    told = {**ANSWER, "usage": usage, "kv_transfer_params": {"kvstore": {}}}
    tidy = json.loads(tidy_answer(compact(told), cached))
    assert tidy["usage"]["prompt_tokens_details"] == {**more, "cached_tokens": cached}
    assert "kv_transfer_params" not in tidy


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_cached_tokens_that_are_not_told_are_not_added(details: Json | None) -> None:
    body = compact({**ANSWER, "usage": {**ANSWER["usage"], "prompt_tokens_details": details}})
    assert tidy_answer(body, 3) is body


def test_an_answer_that_is_no_object_is_passed_on() -> None:
    assert tidy_answer(b'["kv_transfer_params":{', None) == b'["kv_transfer_params":{'


@pytest.mark.parametrize("write", [compact, lambda value: json.dumps(value, indent=1).encode()])
def test_usage_is_found_without_reading_the_answer(write: Any) -> None:
    assert answer_usage(write(ANSWER)) == ((5, 0), 2, "stop")


def test_an_answer_without_usage_tells_none() -> None:
    assert answer_usage(b'{"choices": []}') == ((None, 0), None, "unknown")


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(MEMBERS, scalars),
    ),
    st.sampled_from(["completion", "chat"]),
)
def test_any_object_is_read_or_refused(body: Json, kind: Any) -> None:
    raw = json.dumps(body).encode()
    request = None
    refusal: ApiError | None = None
    try:
        request = parse(raw, kind, 8)
    except ApiError as error:
        refusal = error
    if request is None:
        assert refusal is not None
        assert refusal.status == 400
        assert json.loads(refusal.body())["error"]["message"]
        return
    assert request.model == body.get("model")
    assert request.stream is bool(body.get("stream"))
    assert request.prompt_tokens >= 1
    if kind == "completion":
        assert request.text == body["prompt"]
        assert request.max_tokens == (16 if body.get("max_tokens") is None else body["max_tokens"])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_token_ids_are_kept_as_numbers(ids: list[int]) -> None:
    request = parse(json.dumps({"model": "m", "prompt": ids}).encode(), "completion", 8)
    assert request.ids is not None
    assert memoryview(request.ids).cast("I").tolist() == ids
    assert request.prompt_tokens == len(ids)
    assert request.text is None


def refusal(body: Json, kind: Any = "completion") -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(compact(body), kind, 8)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize("more", [{}, {"logprobs": 5}, {"min_tokens": 1}, {"stream": True}])
def test_an_echo_alone_is_a_completion_of_no_tokens(more: Json) -> None:
    """vllm/entrypoints/openai/completion/protocol.py, `echo_without_generation`."""
    request = parse(
        compact({"prompt": "a", "max_tokens": 0, "echo": True, **more}), "completion", 8
    )
    assert request.max_tokens == 0


def test_no_tokens_without_an_echo_are_refused() -> None:
    for more in ({}, {"echo": False}, {"echo": None}, {"logprobs": 5}):
        error = refusal({"prompt": "a", "max_tokens": 0, **more})
        assert (error.message, error.param) == (
            "max_tokens must be at least 1, got 0.",
            "max_tokens",
        )
    chat = {"messages": [], "max_tokens": 0, "echo": True}  # a chat's echo echoes no prompt
    assert refusal(chat, "chat").param == "max_tokens"
    assert refusal({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 2}).param


def test_a_salt_has_a_length_that_can_be_remembered() -> None:
    for salt in ("s", "\N{SNOWMAN}" * MAX_SALT_CHARACTERS):
        assert (
            parse(compact({"prompt": "a", "cache_salt": salt}), "completion", 8).cache_salt == salt
        )
    for salt in ("", "s" * (MAX_SALT_CHARACTERS + 1)):
        assert refusal({"prompt": "a", "cache_salt": salt}).param == "cache_salt"


def test_tools_of_a_chat_count_as_its_prompt() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 4000}}]
    plain = parse(json.dumps(asked).encode(), "chat", 1).prompt_tokens
    more = parse(json.dumps({**asked, "tools": tools}).encode(), "chat", 1).prompt_tokens
    assert 1000 < more - plain < 1100
