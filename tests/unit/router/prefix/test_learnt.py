"""Prompts without known blocks: later turns begin as earlier ones did, and others do not."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.request import Request, parse
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.learnt import (
    MOST_BYTES,
    PIECE_TOKENS,
    learnt_names,
    tokens_of_pieces,
    written,
)
from kvrouter_store.identity.chain import HASH_BYTES

Message = dict[str, str]
PIECE_BYTES = 4 * PIECE_TOKENS
LONG = "x" * 3000


def chat(messages: list[Message], **more: Any) -> Request:
    return parse(json.dumps({"model": "m", "messages": messages, **more}).encode(), "chat", 1)


def completion(prompt: Any, **more: Any) -> Request:
    return parse(json.dumps({"model": "m", "prompt": prompt, **more}).encode(), "completion", 1)


def names(request: Request, model: str = "m") -> list[bytes]:
    chain = learnt_names(HashCache(), request, model)
    return [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


messages = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.text(max_size=9), st.text()),
    min_size=1,
    max_size=6,
)


@given(before=messages, more=messages)
def test_a_later_turn_begins_with_what_was_written_before(
    before: list[Message], more: list[Message]
) -> None:
    assert written(chat(before + more)).startswith(written(chat(before)))


def test_the_names_of_whole_pieces_are_a_prefix_of_those_of_the_next_turn() -> None:
    first = names(chat([user(LONG)]))
    second = names(chat([user(LONG), {"role": "assistant", "content": LONG}, user("more")]))
    assert len(first) == len(written(chat([user(LONG)]))) // PIECE_BYTES
    assert second[: len(first)] == first
    assert len(second) > len(first)


@pytest.mark.parametrize(
    "other",
    [
        chat([user(LONG)], cache_salt="s"),
        chat([user(LONG)], tools=[{"type": "function", "function": {"name": "f"}}]),
        chat([user("y" + LONG)]),
        completion(LONG),
    ],
    ids=["salt", "tools", "text", "endpoint"],
)
def test_what_begins_otherwise_shares_no_name(other: Request) -> None:
    assert set(names(chat([user(LONG)]))).isdisjoint(names(other))


def test_models_share_no_name() -> None:
    assert set(names(chat([user(LONG)]))).isdisjoint(names(chat([user(LONG)]), "other"))


def test_token_ids_are_compared_as_they_are() -> None:
    ids = list(range(300))
    assert written(completion(ids)) == array("I", ids).tobytes()
    assert len(names(completion(ids))) == 300 // PIECE_TOKENS


@pytest.mark.parametrize("request_", [completion("hi"), chat([user("hi")])])
def test_less_than_a_piece_has_no_name(request_: Request) -> None:
    assert names(request_) == []


def test_a_prompt_of_embeddings_has_no_name() -> None:
    body = json.dumps({"model": "m", "prompt_embeds": LONG}).encode()
    assert names(parse(body, "completion", 1)) == []


def test_pieces_of_a_prompt_that_is_not_compared_whole_stand_for_a_share_of_it() -> None:
    request = completion("x" * (3 * MOST_BYTES))
    pieces = len(names(request))
    known = b"".join(names(request))
    assert pieces * PIECE_BYTES == MOST_BYTES
    assert tokens_of_pieces(known, request.prompt_tokens) == request.prompt_tokens // (pieces + 1)
    assert tokens_of_pieces(known, pieces * PIECE_TOKENS + 100) == PIECE_TOKENS
