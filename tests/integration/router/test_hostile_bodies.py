"""Bodies that nobody sends by accident: refused, or passed on and judged by engines."""

import gzip
import json
from typing import Any

import pytest
from tests.integration.router.conftest import Json, Open, chat, text
from tests.integration.router.test_passthrough import offer, saying

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS = (COMPLETIONS, CHAT, RESPONSES, "/tokenize")


def with_raw(name: str, raw: bytes, body: Json | None = None) -> bytes:
    """A body in which a member has this JSON."""
    members = {key: value for key, value in (body or text()).items() if key != name}
    return b'{"%b": %b, %b' % (name.encode(), raw, json.dumps(members).encode()[1:])


def deep(levels: int, mark: bytes = b"[]") -> bytes:
    opening = mark[:1] if mark == b"[]" else b'{"a":'
    return opening * levels + (b"" if mark == b"[]" else b"1") + mark[1:] * levels


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["prompt", "messages", "model", "stop", "vllm_xargs", "input"])
@pytest.mark.parametrize(
    "raw",
    [deep(100_000), deep(100_000, b"{}"), b"[" * 100_000, deep(1500), b"1e999", b"-1e999"],
    ids=["lists", "objects", "open lists", "less deep", "infinite", "minus infinite"],
)
async def test_depth_and_size_of_json_fail_nothing(
    site: Open, path: str, name: str, raw: bytes
) -> None:
    here = await site()
    status, _, answer = await here.post(with_raw(name, raw), path)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]
    assert (await here.post(text()))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + json.dumps(text()).encode(),
        json.dumps(text()).encode("utf-16"),
        gzip.compress(json.dumps(text()).encode(), mtime=0),
        b'{"model": "m", "prompt": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": Infinity}',
        b'{"model": "m", "prompt": "a",}',
        b'{"model": "m", "prompt": "a"} {}',
        b"{'model': 'm'}",
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "a\x00"}',
        b'{"model": "m", "prompt": "\xc0\x80"}',
        b'{"model": "m", "prompt": "\xed\xa0\x80"}',
        b'{"model": "m", "prompt": "a", "max_tokens": 1000000000000000000000000}',
        b'{"model": "m", "prompt": "a", "max_tokens": 1.5}',
        b'{"model": "m", "prompt": "a", "\\u006dodel": "n"}',
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_json_is_a_400(site: Open, body: bytes, path: str) -> None:
    here = await site()
    status, _, answer = await here.post(body, path)
    if path in (COMPLETIONS, CHAT) or b"max_tokens" not in body:
        assert status == 400
        assert json.loads(answer)["error"]["type"] == "BadRequestError"
    assert status != 500
    assert here.prefill[0].requests == here.decode[0].requests == []


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 400], ids=["e", "-e", "digits"])
@pytest.mark.parametrize("name", ["temperature", "frequency_penalty", "stream_options", "tools"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_number_that_no_double_can_hold_is_a_400(
    site: Open, path: str, name: str, number: bytes
) -> None:
    here = await site(resume_streams=True, canary_sample_rate=1.0)
    for raw in (number, b'[{"a": %b}]' % number):
        status, _, answer = await here.post(with_raw(name, raw, text(stream=True, n=2)), path)
        assert status == 400
        assert "no double can hold" in json.loads(answer)["error"]["message"]
    assert here.prefill[0].requests == here.decode[0].requests == []


@pytest.mark.parametrize("options", [b'"x"', b"5", b"[]", b"true"])
async def test_stream_options_that_are_no_object_are_a_400(site: Open, options: bytes) -> None:
    here = await site(resume_streams=True)
    body = with_raw("stream_options", options, text(stream=True, temperature=0))
    status, _, answer = await here.post(body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "stream_options")


async def test_min_tokens_that_is_no_number_is_a_400(site: Open) -> None:
    here = await site(resume_streams=True)
    body = {**chat(stream=True, temperature=0, min_tokens="three"), "max_tokens": None}
    status, _, answer = await here.post(body, CHAT)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("stream", ["true", 1, "on", 1.0])
async def test_numbers_and_switches_reach_both_legs_as_engines_read_them(
    site: Open, stream: Any
) -> None:
    here = await site()
    odd = text(stream=stream, max_tokens="3", min_tokens=2.0, seed="7", n=True)
    status, headers, _ = await here.post(odd)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert here.prefill[0].requests[0].items() >= {"stream": False, "max_tokens": 1}.items()
    meant = {"stream": True, "max_tokens": 3, "min_tokens": 2, "seed": 7, "n": 1}
    assert here.decode[0].requests[0].items() >= meant.items()


@pytest.mark.parametrize(("background", "status"), [("false", 200), (0, 200), ("yes", 400)])
async def test_a_response_that_one_engine_answers_has_switches_in_other_forms(
    site: Open, background: Any, status: int
) -> None:
    here = await site(0)
    offer(here.decode, saying(200, {}), RESPONSES)
    asked = {"model": "m", "input": "a", "background": background, "stream": "off"}
    assert (await here.post(asked, RESPONSES))[0] == status
    if status == 200:
        assert json.loads(here.decode[0].posted[0][1])["stream"] is False


async def test_many_members_are_passed_on_and_too_many_refused(site: Open) -> None:
    here = await site()
    more: Any = {f"member {number}": number for number in range(200)}
    assert (await here.post(text(**more)))[0] == 200
    for engine in (*here.prefill, *here.decode):
        assert more.items() <= engine.requests[0].items()
    status, _, _ = await here.post(text(**{f"member {n}": n for n in range(20_000)}))
    assert status == 400


async def test_a_long_text_passes(site: Open) -> None:
    here = await site()
    status, _, _ = await here.post(text(prompt="x" * 900_000))
    assert status == 200
    assert len(here.decode[0].requests[0]["prompt"]) == 900_000


async def test_what_a_body_is_called_does_not_matter(site: Open) -> None:
    here = await site()
    for content_type in ("text/plain", "application/json; charset=utf-8", "x"):
        status, _, _ = await here.post(chat(), CHAT, **{"content-type": content_type})
        assert status == 200
    assert {sent["content-type"] for sent in here.decode[0].headers} == {"application/json"}
