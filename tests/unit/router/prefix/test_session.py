"""All turns of a session have one name, by the best that the client tells."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.request import Request, parse
from kvrouter.prefix.learnt import (
    MOST_NAME,
    MOST_STANDING,
    SESSION_HEADERS,
    session_of,
    standing,
)

Message = dict[str, Any]
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(messages: list[Message], **more: Any) -> Request:
    return parse(json.dumps({"model": "m", "messages": messages, **more}).encode(), "chat", 1)


def said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


HELLO = chat([said("user", "Hello")], prompt_cache_key="k")
contents = st.one_of(st.text(), st.lists(st.fixed_dictionaries({"text": st.text()}), max_size=2))


def test_the_header_that_is_set_comes_first() -> None:
    headers = dict.fromkeys((*SESSION_HEADERS, "x-mine"), "other") | {"x-mine": "mine"}
    assert session_of(HELLO, headers, "x-mine") == b"mine"


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_headers_of_agents_come_before_the_body(name: str) -> None:
    assert session_of(HELLO, {name: "s"}, None) == b"s"
    assert session_of(HELLO, {name: "s"}, "x-mine") == b"s"


def test_an_empty_header_names_no_session() -> None:
    assert session_of(HELLO, {"x-session-id": "", "x-mine": ""}, "x-mine") == b'"k"'


def test_the_key_of_the_prompt_cache_comes_before_the_messages() -> None:
    assert session_of(HELLO, {}, None) == b'"k"'


def test_a_person_is_no_session() -> None:
    one, other = (chat([said("user", "Hello")], user=name) for name in "ab")
    assert session_of(one, {}, None) == session_of(other, {}, None)


@given(asked=contents, turns=st.lists(contents, min_size=1, max_size=4), system=st.booleans())
def test_all_turns_of_a_chat_begin_alike(asked: Any, turns: list[Any], system: bool) -> None:
    begun = [SYSTEM] * system + [said("user", asked)]
    later = [said("assistant" if at % 2 == 0 else "user", turn) for at, turn in enumerate(turns)]
    first = session_of(chat(begun), {}, None)
    assert first
    assert session_of(chat(begun + later), {}, None) == first


@given(one=st.text(), other=st.text())
def test_other_questions_are_other_sessions(one: str, other: str) -> None:
    names = {session_of(chat([SYSTEM, said("user", text)]), {}, None) for text in (one, other)}
    assert len(names) == len({one, other})


def test_a_completion_without_a_name_has_no_session() -> None:
    body = json.dumps({"model": "m", "prompt": "Hello"}).encode()
    assert session_of(parse(body, "completion", 1), {}, None) is None


@pytest.mark.parametrize("key", ["", {}, 0, None])
def test_a_key_that_is_no_name_leaves_the_beginning_as_the_sessions_name(key: Any) -> None:
    plain = session_of(chat([said("user", "Hello")]), {}, None)
    assert session_of(chat([said("user", "Hello")], prompt_cache_key=key), {}, None) == plain


def test_a_long_name_is_cut() -> None:
    long = session_of(chat([said("user", "Hello")], prompt_cache_key="k" * (1 << 20)), {}, None)
    assert long is not None
    assert len(long) == MOST_NAME


def test_only_the_beginning_of_long_instructions_is_read() -> None:
    asked = chat([said("user", "Hello")], system="s" * (1 << 20), tools=[{"name": "t"}])
    assert len(standing(asked)) < 2 * MOST_STANDING
