"""Which completion requests the engine takes, and what its answers look like."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter_store.torch_engine.generation import Generated
from kvrouter_store.torch_engine.requests import NEUTRAL, Answers, BadRequest, CompletionRequest

pytestmark = pytest.mark.torch
LONGEST = 100
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def read(**body: Any) -> CompletionRequest:
    whole = {"model": "m", "prompt": [1, 2, 3], **body}
    return CompletionRequest.read(whole, lambda text: [ord(each) for each in text], LONGEST, 256)


def test_a_prompt_is_a_text_or_token_ids_also_as_the_only_one_of_a_list() -> None:
    assert read(prompt="AB").generate.prompt == [65, 66]
    assert read(prompt=["AB"]).generate.prompt == [65, 66]
    assert read(prompt=[[7, 8]]).generate.prompt == [7, 8]


@pytest.mark.parametrize("prompt", [None, "", [], [[]], ["a", "b"], [1, "a"], [True], 5, {}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest, match="prompt must be"):
        read(prompt=prompt)


@pytest.mark.parametrize("token", [-1, 256])
def test_tokens_that_the_model_does_not_have_are_refused(token: int) -> None:
    with pytest.raises(BadRequest, match="from 0 to 255"):
        read(prompt=[1, token])


@pytest.mark.parametrize("most", [0, -1, 98, "5", 1.5])
def test_an_answer_has_at_least_one_token_and_fits_behind_its_prompt(most: Any) -> None:
    with pytest.raises(BadRequest, match="max_tokens must be"):
        read(max_tokens=most)
    assert read(max_tokens=97).generate.max_tokens == 97


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    for value in NEUTRAL[name]:
        read(**{name: value})
    with pytest.raises(BadRequest, match=f"does not support {name}"):
        read(**{name: 3})


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "prompt",
                "max_tokens",
                "temperature",
                "seed",
                "stream_options",
                "cache_salt",
                *NEUTRAL,
            ]
        ),
        JSON,
    )
)
def test_any_json_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        request = read(**body)
    except BadRequest:
        return
    assert 0 < len(request.generate.prompt) + request.generate.max_tokens <= LONGEST


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadRequest, match="JSON object"):
        CompletionRequest.read([], list, LONGEST, 256)  # type: ignore[arg-type]


def test_an_answer_says_what_the_router_reads_of_vllm() -> None:
    answers = Answers(read(return_token_ids=True))
    transfer = {"kvstore": {"manifest": "ab", "blocks": 2}}
    whole = answers.whole(Generated([4, 5], 16, "length", transfer), "xy")
    assert whole["kv_transfer_params"] == transfer
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    (choice,) = whole["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([4, 5], [1, 2, 3])


def test_the_first_event_names_the_prompt_and_the_last_one_the_reason() -> None:
    answers = Answers(read(return_token_ids=True, stream=True, stream_options={"include_usage": 1}))
    events = [answers.token(4, "x"), answers.token(5, "")]
    ended = answers.closing(Generated([4, 5], 0, "stop"), "y")
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [[1, 2, 3], None]
    assert [event["choices"][0]["token_ids"] for event in events] == [[4], [5]]
    assert ended[0]["choices"][0]["finish_reason"] == "stop"
    assert len(ended) == 1  # include_usage was not true
