"""The salt of a tenant: which one, and where it goes in a body."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrouter import _native
from kvrouter.openai.request import parse
from kvrouter.serving.request.caller_salt import derived
from kvrouter.serving.request.versions import with_member

NAMES = st.sampled_from(["a", "cache_salt_2", "user", "model", "stream", "\N{SNOWMAN}"])
PROMPTS = st.one_of(
    st.text(min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1),
    st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4),
)
SPACE = st.sampled_from(["", " ", "\n\t "])


def test_tenants_and_their_own_salts_are_never_mixed_up() -> None:
    pairs = [("a", ""), ("a", "b"), ("ab", ""), ("b", "a"), ("1:a", "b"), ("", "1:a")]
    salts = {derived(tenant, own) for tenant, own in pairs}
    assert len(salts) == len(pairs)
    assert {len(salt) for salt in salts} == {64}
    assert derived("a", "b") == derived("a", "b")


@given(
    prompt=PROMPTS,
    others=st.dictionaries(NAMES, st.none(), max_size=4),
    own=st.sampled_from([None, "s", "\N{SNOWMAN}" * 9]),
    place=st.integers(0, 5),
    around=st.tuples(SPACE, SPACE),
)
def test_a_body_with_a_salt_reads_as_the_same_request_and_its_spans_fit(
    prompt: Any, others: dict[str, None], own: str | None, place: int, around: tuple[str, str]
) -> None:
    members = [*others.items(), ("prompt", prompt)]
    if own is not None:
        members.insert(place, ("cache_salt", own))
    body = json.dumps(dict(members), indent=1).join(around)
    request = parse(body.encode(), "completion", 16)
    salted = with_member(request, "cache_salt", b'"new"')
    assert json.loads(salted.body) == {**json.loads(body), "cache_salt": "new"}
    spans, ids = _native.scan_object(salted.body)
    assert (salted.spans, salted.ids) == (spans, ids)
    again = parse(salted.body, "completion", 16)
    assert again.cache_salt == "new"
    for name in ("prompts", "model", "stream", "max_tokens", "n", "prompt_tokens"):
        assert getattr(salted, name) == getattr(again, name), name
