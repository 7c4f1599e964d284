"""Reading requests, and tidying answers, without a socket."""

import json
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from kvrouter.errors import ApiError
from kvrouter.openai.request import Request, parse
from kvrouter.openai.response import answer_reason, answer_usage, tidy_answer

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


class Lax(BaseModel):
    """Members as vLLM's models have them: pydantic reads them by its lax rules."""

    stream: bool | None = None
    echo: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt: list[Annotated[int, Field(ge=0)]] | list[str] | str = ""


ODD = (
    *("16.0", "16.5", "1e1", '"16"', '" 16 "', '"+16"', '"1_0"', '"16.0"', '"1e1"', '""'),
    *("true", "false", "0", "1", "2", "1.0", "-1", "-1.0", '"-1"', "[1]"),
    *('"true"', '"True"', '"yes"', '"on"', '"n"', '" true"', '"2"', "{}", "null"),
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
    assert answer_usage(write(ANSWER)) == ((5, None), 2)
    assert answer_reason(write(ANSWER)) == "stop"


def test_an_answer_without_usage_tells_none() -> None:
    assert answer_usage(b'{"choices": []}') == ((None, None), 0)
    assert answer_reason(b'{"choices": []}') == "unknown"


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
    meant = Lax.model_validate(body)
    assert request.model == body.get("model")
    assert request.stream is bool(meant.stream)
    assert request.prompt_tokens >= 1
    if kind == "completion":
        assert request.text == body["prompt"]
        assert request.max_tokens == (16 if meant.max_tokens is None else meant.max_tokens)


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


def read_or_refuse(body: Json) -> Request | ApiError:
    try:
        return parse(compact(body), "completion", 99)
    except ApiError as error:
        return error


@pytest.mark.parametrize("raw", ODD)
@pytest.mark.parametrize("name", [name for name in Lax.model_fields if name != "prompt"])
def test_numbers_and_switches_mean_what_pydantic_reads(name: str, raw: str) -> None:
    body = json.loads(f'{{"prompt": "a", "max_tokens": 99, "{name}": {raw}}}')
    try:
        wanted = getattr(Lax.model_validate(body), name)
    except ValidationError:
        wanted = "refused"
    request = read_or_refuse(body)
    if isinstance(request, ApiError):  # in time, or because it is a number out of bounds
        checked = name in ("stream", "max_tokens", "min_tokens", "n")
        assert (wanted == "refused" and checked) or "must be at" in request.message
        return
    if wanted == "refused":  # by the engine
        wanted = body[name]
    assert json.loads(request.body) == {**body, name: wanted}
    assert repr(json.loads(request.body)[name]) == repr(wanted)
    if name in ("stream", "max_tokens", "n"):
        usual = {"stream": False, "max_tokens": 16, "n": 1}[name]
        assert getattr(request, name) == (usual if wanted is None else wanted)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1.0, 2.0], [1, 2]),
        ([True, 2], [1, 2]),
        ([1, "2"], [1, 2]),
        (["1", 2], [1, 2]),
        (["1", "2"], None),
        ([[1.0], [2]], None),
    ],
)
def test_token_ids_in_other_forms_are_those_that_engines_read(
    prompt: list[Any], ids: list[int] | None
) -> None:
    request = parse(compact({"prompt": prompt}), "completion", 8)
    found = None if request.ids is None else memoryview(request.ids).cast("I").tolist()
    assert found == ids
    assert (request.prompts is None) == (ids is not None)


@pytest.mark.parametrize("prompt", [[1.5], [1, "a"], [-1.0], ["a", [1]], [1e10], [{}], [None]])
def test_what_is_no_token_id_in_any_form_is_refused(prompt: list[Any]) -> None:
    assert refusal({"prompt": prompt, "max_tokens": "16"}).param == "prompt"


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**70, "random"])
def test_what_engines_check_is_theirs_to_refuse(seed: Any) -> None:
    body = compact({"prompt": "a", "seed": seed, "priority": 2**62})
    assert parse(body, "completion", 8).body is body


def test_a_body_in_usual_forms_keeps_its_bytes() -> None:
    body = b'{ "prompt" : "\\u0061", "max_tokens": 16, "stream":true, "seed": 5, "echo": false }'
    assert parse(body, "completion", 8).body is body


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


@pytest.mark.parametrize("salt", ["s", "\N{SNOWMAN}" * 128, " a-b_c.d%=+~\n"])
def test_a_salt_that_vllm_takes_is_taken(salt: str) -> None:
    assert parse(compact({"prompt": "a", "cache_salt": salt}), "completion", 8).cache_salt == salt


@pytest.mark.parametrize("salt", ["s" * 129, "a@b", "a/b", "a\\b", "a\0b"])
def test_a_salt_that_vllm_refuses_is_refused_in_its_words(salt: str) -> None:
    error = refusal({"prompt": "a", "cache_salt": salt})
    assert error.param == "cache_salt"
    assert error.message == (
        "Parameter 'cache_salt' must be at most 128 characters and must "
        "not contain '@', '/', '\\\\', or NUL."
    )


@pytest.mark.parametrize("salt", ["", 7, ["s"], {}])
def test_a_salt_is_a_text(salt: object) -> None:
    error = refusal({"prompt": "a", "cache_salt": salt})
    assert error.message == "Parameter 'cache_salt' must be a non-empty string if provided."


def test_tools_of_a_chat_count_as_its_prompt() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 4000}}]
    plain = parse(json.dumps(asked).encode(), "chat", 1).prompt_tokens
    more = parse(json.dumps({**asked, "tools": tools}).encode(), "chat", 1).prompt_tokens
    assert 1000 < more - plain < 1100
