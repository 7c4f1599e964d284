"""The id of a request: the client's where it is sane, else the router's; in answers and on legs."""

import asyncio

import pytest
from tests.integration.router.conftest import Open, Site, text

BODY = b'{"model": "m", "prompt": "a", "max_tokens": 1}'


async def sent(here: Site, lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    """The value of x-request-id in the answer to a request with these header lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(BODY)
    writer.write(b"POST %b HTTP/1.1\r\nhost: h\r\n%b%b%b" % (path, lines, length, BODY))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head, _, _ = answer.partition(b"\r\n\r\n")
    ids = [
        line.partition(b": ")[2]
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"x-request-id:")
    ]
    assert len(ids) == 1, answer
    return ids[0]


@pytest.mark.parametrize("given", [b"a", b"A-z0.9_:/+=@", b"x" * 128])
async def test_a_sane_id_is_the_requests(site: Open, given: bytes) -> None:
    here = await site()
    assert await sent(here, b"X-Request-Id: %b\r\n" % given) == given
    for engine in (*here.prefill, *here.decode):
        assert engine.headers[0]["x-request-id"].encode() == given


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"x-request-id:\r\n",
        b"x-request-id: a b\r\n",
        b"x-request-id: a\tb\r\n",
        b"x-request-id: a\xe9\r\n",
        b"x-request-id: a%0d%0aset-cookie\r\n",
        b'x-request-id: "a"\r\n',
        b"x-request-id: %b\r\n" % (b"x" * 129),
        b"x-request-id: %b\r\n" % (b"x" * 20_000),
        b"x-request-id: a\r\nx-request-id: a\r\n",
        b"x-request-id: a\r\nX-REQUEST-ID: b\r\n",
    ],
)
async def test_any_other_is_replaced_by_one_of_the_routers(site: Open, lines: bytes) -> None:
    here = await site()
    first, second = await sent(here, lines), await sent(here, lines)
    assert first != second
    assert first.replace(b"-", b"").isalnum()
    seen = [headers["x-request-id"].encode() for headers in here.decode[0].headers]
    assert seen == [first, second]


async def test_refusals_bear_the_id_too(site: Open) -> None:
    here = await site(api_key=["k"])
    assert await sent(here, b"x-request-id: mine\r\n") == b"mine"
    assert await sent(here, b"x-request-id: mine\r\n", b"/tokenize") == b"mine"
    assert await sent(here, b"x-request-id: a b\r\n", b"/v1/models") != b"a b"
    assert here.decode[0].headers == []


async def test_the_parts_of_a_request_have_ids_of_their_own(site: Open) -> None:
    here = await site()
    prompts = text(prompt=["a", "b", "c"])
    given = "x" * 128
    await asyncio.gather(*(here.post(prompts, **{"x-request-id": each}) for each in ("1", given)))
    for engine in (*here.prefill, *here.decode):
        ids = [headers["x-request-id"] for headers in engine.headers]
        assert len(set(ids)) == len(ids) == 6
        assert {name.rpartition("-")[0] for name in ids} == {"1", given}
