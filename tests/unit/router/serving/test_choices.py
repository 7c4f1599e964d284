"""Requests taken apart and answers put together, without a socket."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ApiError
from kvrouter.openai.request import Kind, Request, parse
from kvrouter.openai.sse import EventBuffer, split_events
from kvrouter.serving.choices.merge import (
    BadShare,
    Share,
    ShareError,
    StreamMerge,
    merge_answers,
    split,
)

Json = dict[str, Any]
LIMIT = 64
ID = b'"cmpl-one"'

texts = st.text(min_size=1, max_size=8)
token_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)


def read(kind: Kind = "completion", **more: Any) -> Request:
    body = {"model": "m", "messages" if kind == "chat" else "prompt": ["a"], **more}
    return parse(json.dumps(body).encode(), kind, LIMIT)


def asked(share: Share) -> Json:
    body: Json = json.loads(share.request.body)
    return body


# -- taking apart


@given(st.lists(texts, min_size=1, max_size=6) | st.lists(token_lists, min_size=1, max_size=6))
def test_a_list_becomes_a_request_for_each_prompt(prompts: list[Any]) -> None:
    request = read(prompt=prompts, user="u", logit_bias={"1": 1.50}, n=3)
    shares = split(request, alone=False)
    rest = {"model": "m", "user": "u", "logit_bias": {"1": 1.5}, "n": 3}
    assert [asked(share) for share in shares] == [{**rest, "prompt": p} for p in prompts]
    assert [share.first for share in shares] == [i * 3 for i in range(len(prompts))]
    assert all(share.request.n == 3 and share.counts_prompt for share in shares)
    assert b'"logit_bias": {"1": 1.5}' in shares[0].request.body


@given(st.lists(token_lists, min_size=1, max_size=4), st.integers(1, 4), st.integers(-5, 5))
def test_samples_that_go_alone_have_the_seeds_that_their_engine_would_give(
    prompts: list[list[int]], n: int, seed: int
) -> None:
    request = read(prompt=prompts, n=n, seed=seed, best_of=n)
    as_one = [asked(share)["seed"] for share in split(request, alone=True, varies_seeds=False)]
    assert as_one == [seed] * len(prompts) * n
    shares = split(request, alone=True)
    expected = [{"prompt": p, "seed": seed + i} for p in prompts for i in range(n)]
    assert [asked(share) for share in shares] == [{"model": "m", **one} for one in expected]
    assert [share.first for share in shares] == list(range(len(prompts) * n))
    assert [share.counts_prompt for share in shares] == [i == 0 for _ in prompts for i in range(n)]


def test_samples_of_a_chat_go_alone_without_a_seed_they_were_not_given() -> None:
    shares = split(read("chat", n=2, seed=None), alone=True)
    assert [asked(share) for share in shares] == [
        {"model": "m", "messages": ["a"], "seed": None}
    ] * 2


def test_what_one_engine_does_whole_is_not_touched() -> None:
    request = read(prompt="hello", n=3)
    (share,) = split(request, alone=False)
    assert share.request is request


def test_a_list_beside_embeddings_stays_one_request() -> None:
    request = read(prompt=["a", "b"], prompt_embeds="AAAA")
    assert request.prompts is None


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"prompt": []}, "prompt", "non-empty"),
        ({"prompt": [""]}, "prompt", "non-empty"),
        ({"prompt": ["a", ""]}, "prompt", "non-empty"),
        ({"prompt": [[1], []]}, "prompt", "non-empty"),
        ({"prompt": ["a", 1]}, "prompt", "alone"),
        ({"prompt": [1, "a"]}, "prompt", "Token ids"),
        ({"prompt": [[1], "a"]}, "prompt", "alone"),
        ({"prompt": [[1], ["a"]]}, "prompt", "Token ids"),
        ({"prompt": [[[1]]]}, "prompt", "Token ids"),
        ({"prompt": [[1], [-1]]}, "prompt", "Token ids"),
        ({"prompt": {"a": 1}}, "prompt", "text"),
        ({"prompt": ["a"] * 65}, "prompt", "exceeds the maximum allowed count of 64"),
        ({"prompt": ["a"] * 22, "n": 3}, "prompt", "exceeds the maximum allowed count of 21"),
        ({"n": 65}, "n", "at most 64"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": "two"}, "n", "integer"),
        ({"n": 2, "seed": 1.5}, "seed", "integer"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_by_its_name(
    more: Json, param: str, word: str
) -> None:
    with pytest.raises(ApiError) as refused:
        split(read(**more), alone=True)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert word in refused.value.message


def test_a_prompt_of_one_space_is_a_prompt() -> None:
    assert len(split(read(prompt=[" ", "a"]), alone=False)) == 2


# -- whole answers


def part(first: int, n: int = 1, counts_prompt: bool = True) -> Share:
    return Share(read(n=n, prompt="x"), first, counts_prompt)


def answer(choices: list[Json], prompt: int = 5, completion: int = 2, **more: Any) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion}
    usage["completion_tokens"] = completion
    whole = {"id": "e", "object": "o", "created": 7, "model": "m", "choices": choices}
    return json.dumps({**whole, "usage": {**usage, **more.pop("usage", {})}, **more}).encode()


def choice(index: int, text: str = "t", **more: Any) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": "stop", **more}


def test_choices_are_moved_and_not_rebuilt() -> None:
    numbers = b'{"index": 0, "text": "\\u00e9", "logprobs": {"v": [-1.50, 1e-07]}}'
    one = answer([]).replace(b"[]", b"[" + numbers + b"]")
    merged = merge_answers([(part(0), one, None), (part(1), one, None)], ID)
    assert numbers in merged
    assert numbers.replace(b'"index": 0', b'"index": 1') in merged
    told = json.loads(merged)
    assert (told["id"], told["object"], told["created"]) == ("cmpl-one", "o", 7)


def test_choices_stand_in_the_order_of_their_indices() -> None:
    pieces = [
        (part(0, 2), answer([choice(1, "b"), choice(0, "a")]), None),
        (part(2, 2), answer([choice(0, "c"), choice(1, "d")]), None),
    ]
    told = json.loads(merge_answers(pieces, ID))["choices"]
    assert [(c["index"], c["text"]) for c in told] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


def test_usage_is_the_sum_and_each_prompt_counts_once() -> None:
    told = {"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}
    reasons = {"usage": {"completion_tokens_details": {"reasoning_tokens": 3}}}
    pieces = [
        (part(0), answer([choice(0)], 5, 2, **told), 1),
        (part(1, counts_prompt=False), answer([choice(0)], 5, 3, **told), 4),
        (part(2), answer([choice(0)], 7, 4, **told), None),
        (part(3), answer([choice(0)], 1, 1, **reasons), 9),
    ]
    assert json.loads(merge_answers(pieces, ID))["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": 10,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_what_tells_of_one_share_alone_is_left_out() -> None:
    one = answer([choice(0)], kv_transfer_params={"a": 1}, metrics={"b": 2}, bootstrap_room=3)
    told = json.loads(merge_answers([(part(0), one, None), (part(1), one, None)], ID))
    assert set(told) == {"id", "object", "created", "model", "choices", "usage"}


@pytest.mark.parametrize(
    "body",
    [
        b"not JSON",
        b"{}",
        b'{"choices": 1}',
        b'{"choices": [1]}',
        answer([]),
        answer([choice(0), choice(1)]),
        answer([choice(1)]),
        answer([choice(-1)]),
        answer([{"index": "x"}]),
        answer([choice(0)], usage={"completion_tokens": None}),
        answer([choice(0)], usage={"prompt_tokens": 2**64 - 1}),
        answer([choice(0)]).replace(b'"created": 7', b'"created": 1e999'),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_no_answer(body: bytes) -> None:
    with pytest.raises(BadShare):
        merge_answers([(part(0), answer([choice(0)]), None), (part(1), body, None)], ID)


# -- streams


def frame(body: Json) -> bytes:
    return b"data: %b" % json.dumps(body).encode()


def stream(name: str, share: Share, tokens: int, usage: bool) -> list[bytes]:
    """What an engine sends of a share, event by event."""
    head = {"id": name, "created": len(name), "model": "m"}
    events = [b": keep-alive"]
    for at in range(tokens):
        for index in range(share.request.n):
            text = f"{name}.{index}.{at}\n"
            events.append(frame({**head, "choices": [choice(index, text)], "usage": None}))
    if usage:
        told = {"prompt_tokens": 3, "total_tokens": 3 + tokens, "completion_tokens": tokens}
        events.append(frame({**head, "choices": [], "usage": told}))
    return [*events, b"data: [DONE]"]


streams = st.tuples(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),  # samples of each share
    st.integers(0, 3),  # tokens
    st.booleans(),  # usage
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)


@given(streams, st.data())
def test_streams_cut_anywhere_and_mixed_anyhow_become_one(
    given_: tuple[list[int], int, bool, bytes], data: st.DataObject
) -> None:
    samples, tokens, usage, end = given_
    firsts = [sum(samples[:i]) for i in range(len(samples))]
    shares = [part(first, n) for first, n in zip(firsts, samples, strict=True)]
    bodies = [
        b"".join(event + end for event in stream(f"s{i}", share, tokens, usage))
        for i, share in enumerate(shares)
    ]
    merge, cuts, got = StreamMerge(ID), [EventBuffer() for _ in shares], b""
    while any(bodies):
        at = data.draw(st.sampled_from([i for i, body in enumerate(bodies) if body]))
        size = data.draw(st.integers(1, len(bodies[at])))
        piece, bodies[at] = bodies[at][:size], bodies[at][size:]
        for event in split_events(cuts[at].take(piece)):
            got += merge.event(shares[at], event, None)[0]
    got += merge.end()
    assert not any(map(len, cuts))
    frames = [f for f in got.split(b"\n\n") if f and not f.startswith(b":")]
    assert frames[-1] == b"data: [DONE]"
    events = [json.loads(f.removeprefix(b"data: ")) for f in frames[:-1]]
    if usage:
        told = events.pop()
        whole = len(shares) * tokens
        assert told["choices"] == []
        assert told["usage"]["prompt_tokens"] == 3 * len(shares)
        assert told["usage"]["completion_tokens"] == whole
        assert told["usage"]["total_tokens"] == 3 * len(shares) + whole
    assert all(event["id"] == "cmpl-one" for event in events)
    assert len({event["created"] for event in events}) <= 1
    heard: dict[int, str] = {}
    for event in events:
        (one,) = event["choices"]
        heard[one["index"]] = heard.get(one["index"], "") + one["text"]
    assert heard == {
        first + index: "".join(f"s{i}.{index}.{at}\n" for at in range(tokens))
        for i, (first, n) in enumerate(zip(firsts, samples, strict=True))
        for index in range(n)
        if tokens
    }


def test_an_engines_error_is_told_as_it_wrote_it() -> None:
    problem = b'{"error": {"message": "out of memory", "code": 500}}'
    with pytest.raises(ShareError) as ended:
        StreamMerge(ID).event(part(0), b"data: " + problem, None)
    assert ended.value.payload == problem


@pytest.mark.parametrize(
    "event", [b"data: x", b'data: {"id": 1}', b'data: {"choices": [{"index": 4}]}']
)
def test_an_event_that_is_no_completions_is_not_passed_on(event: bytes) -> None:
    with pytest.raises(BadShare):
        StreamMerge(ID).event(part(0), event, None)


def test_data_on_several_lines_is_one_event() -> None:
    event = b'event: a\ndata: {"id": 1,\ndata: "choices": [{"index": 0}]}'
    mixed, choices = StreamMerge(ID).event(part(2), event, None)
    assert choices == 1
    assert json.loads(mixed.removeprefix(b"data: "))["choices"] == [{"index": 2}]


def test_usage_beside_choices_stays_with_them() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    event = frame({"id": "e", "choices": [choice(0)], "usage": usage})
    merge = StreamMerge(ID)
    mixed, _ = merge.event(part(1), event, None)
    assert json.loads(mixed.removeprefix(b"data: "))["usage"] == usage
    assert merge.end() == b"data: [DONE]\n\n"
