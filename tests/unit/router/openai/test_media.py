"""Media within requests: base64 counts and compares as little as it is worth."""

import base64
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.openai.media import LEAST_BYTES, MEDIUM_TOKENS, media, with_digests
from kvrouter.openai.request import BYTES_PER_TOKEN, parse
from kvrouter.prefix.learnt import MOST_BYTES, PIECE_TOKENS, tokens_of_pieces, written

ALL = 1 << 30


def image(seed: int, size: int = 100_000) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


def openai_part(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def anthropic_part(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def chat(*content: Any, **dumped: Any) -> bytes:
    messages = [{"role": "user", "content": each} for each in content]
    return json.dumps({"model": "m", "messages": messages}, **dumped).encode()


PARTS = pytest.mark.parametrize("part", [openai_part, anthropic_part])


@PARTS
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_an_image_counts_as_many_tokens_as_engines_make_of_it(
    part: Any, separators: tuple[str, str]
) -> None:
    text = parse(chat("a" * 4000), "chat", 1).prompt_tokens
    body = chat("a" * 4000, [part(image(1)), part(image(2))], separators=separators)
    counted = parse(body, "chat", 1).prompt_tokens
    assert counted == pytest.approx(text + 2 * MEDIUM_TOKENS, abs=150)


@PARTS
def test_the_same_image_compares_equal_and_another_one_does_not(part: Any) -> None:
    def compared(seed: int) -> bytes:
        return written(parse(chat([part(image(seed))]), "chat", 1))

    assert compared(1) == compared(1) != compared(2)
    assert len(compared(1)) < 500


def test_images_of_the_same_beginning_and_other_lengths_differ() -> None:
    data = image(1)
    bodies = [chat([openai_part(each)]) for each in (data, data + "AAAA")]
    assert len({with_digests(body, 0, len(body), ALL) for body in bodies}) == 2


@pytest.mark.parametrize(
    "text", ["many words " * 4000, "x" * 50_000, "1f" * 20_000, "\u00e9" * 9000]
)
def test_long_text_is_no_medium(text: str) -> None:
    body = chat(text, [{"type": "tool_use", "input": {"data": text}}], ensure_ascii=False)
    assert media(body, 0, len(body)) == []
    assert with_digests(body, 0, len(body), ALL) == body


def test_pieces_of_a_prompt_of_images_stand_for_their_share_of_its_tokens() -> None:
    request = parse(chat(*([openai_part(image(seed))] for seed in range(20))), "chat", 1)
    pieces = len(written(request)) // (PIECE_TOKENS * BYTES_PER_TOKEN)
    each = tokens_of_pieces(bytes(32 * pieces), request.prompt_tokens)
    assert each * pieces > 0.7 * request.prompt_tokens > 0.7 * 20 * MEDIUM_TOKENS


@given(
    parts=st.lists(
        st.one_of(st.text(max_size=40), st.integers(1, 3).map(lambda seed: image(seed, 20_000))),
        max_size=6,
    ),
    more=st.lists(st.text(max_size=9), max_size=2),
    most=st.integers(1, 3000),
)
def test_what_is_compared_of_a_later_turn_begins_with_what_was_of_an_earlier_one(
    parts: list[str], more: list[str], most: int
) -> None:
    def compared(contents: list[str]) -> bytes:
        body = chat(*([openai_part(each)] for each in contents))
        start, end = body.index(b"[") + 1, body.rindex(b"]")
        return with_digests(body, start, end, most)

    early, late = compared(parts), compared(parts + more)
    assert late.startswith(early)
    assert len(late) <= most


def test_of_a_body_of_many_images_no_more_is_compared_than_is_allowed() -> None:
    body = chat(*([openai_part(image(seed, LEAST_BYTES))] for seed in range(30)))
    assert len(with_digests(body, 0, len(body), 1000)) == 1000
    assert len(written(parse(body, "chat", 1))) < MOST_BYTES
