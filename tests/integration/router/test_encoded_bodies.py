"""Bodies that clients compress: decoded within the bounds of others, or refused by name."""

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable

import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, text
from tests.integration.router.test_passthrough import offer, saying

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"


def packed(**more: object) -> bytes:
    return gzip.compress(json.dumps(text(**more)).encode())


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
async def test_an_engine_gets_the_decoded_body(site: Open, coding: str, path: str) -> None:
    here = await site()
    offer(here.decode, saying(200, {}), EMBEDDINGS)
    body = json.dumps(text()).encode()
    sent = {"content-encoding": coding.upper()}
    assert (await here.post(CODINGS[coding](body), path, **sent))[0] == 200
    engine = here.decode[0]
    if path == EMBEDDINGS:
        assert engine.posted == [(path, body)]
    else:
        assert engine.requests[0].items() >= {"model": "m", "max_tokens": 4}.items()
    assert "content-encoding" not in (engine.headers or engine.posted_headers)[0]


async def test_a_body_in_no_coding_is_as_without_the_header(site: Open) -> None:
    here = await site()
    for coding in ("identity", "", "identity, identity"):
        assert (await here.post(text(), **{"content-encoding": coding}))[0] == 200


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip, gzip", "x" * 500])
async def test_a_coding_that_is_not_known_is_a_415_that_names_those_that_are(
    site: Open, coding: str
) -> None:
    here = await site()
    status, headers, answer = await here.post(packed(), **{"content-encoding": coding})
    assert (status, headers["accept-encoding"]) == (415, "gzip, deflate")
    error = json.loads(answer)["error"]
    assert "send gzip" in error["message"]
    assert len(error["message"]) < 200
    assert here.prefill[0].requests == here.decode[0].requests == []


@pytest.mark.parametrize(
    "broken",
    [
        lambda body: body[:-1],
        lambda body: body[:-5],
        lambda body: body[:12],
        lambda body: b"",
        lambda body: body + b"x",
        lambda body: body + body,
        lambda body: body[:-8] + bytes(8),
        lambda _: b"{}",
    ],
    ids=["cut", "cut sum", "cut head", "nothing", "more", "again", "wrong sum", "plain"],
)
async def test_broken_data_is_a_400_that_says_so(
    site: Open, broken: Callable[[bytes], bytes]
) -> None:
    here = await site()
    status, _, answer = await here.post(broken(packed()), **{"content-encoding": "gzip"})
    assert (status, "no valid gzip" in json.loads(answer)["error"]["message"]) == (400, True)
    assert here.prefill[0].requests == here.decode[0].requests == []


@pytest.mark.parametrize("size", [255 << 10, 256 << 10, (256 << 10) + 1, 600_000, 900_000])
async def test_what_is_decoded_in_pieces_is_whole(site: Open, size: int) -> None:
    here = await site()
    offer(here.decode, saying(200, {}), EMBEDDINGS)
    for texts in ("x" * size, "".join(random.Random(size).choices("abcdefgh ", k=size))):
        body = json.dumps({"model": "m", "input": texts}).encode()
        sent = {"content-encoding": "gzip"}
        assert (await here.post(gzip.compress(body), EMBEDDINGS, **sent))[0] == 200
        assert here.decode[0].posted[-1] == (EMBEDDINGS, body)


async def test_a_bomb_is_a_413_and_takes_no_more_than_a_body_may(site: Open) -> None:
    here = await site(max_body_memory=2 << 20)
    server = here.app.ports.public
    for size in (2 << 20, 400 << 20):
        bomb = zlib.compressobj(9, wbits=31)
        body = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(size >> 20))
        body += bomb.compress(b" ") + bomb.flush()
        status, _, answer = await here.post(body, **{"content-encoding": "gzip"})
        assert (status, json.loads(answer)["error"]["type"]) == (413, "PayloadTooLargeError")
        assert server.incoming_bytes == 0


async def test_decoding_shares_the_memory_of_bodies_that_arrive(site: Open) -> None:
    here = await site(max_body_memory=1_000_000)
    server = here.app.ports.public
    _, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 700001\r\n\r\n")
    writer.write(b"x" * 700_000)
    await until(lambda: server.incoming_bytes == 700_000)
    body = packed(prompt="x" * 400_000)
    status, headers, _ = await here.post(body, **{"content-encoding": "gzip"})
    assert (status, headers["retry-after"]) == (503, "1")
    assert server.incoming_bytes == 700_000
    writer.close()
    await until(lambda: server.incoming_bytes == 0)
    assert (await here.post(body, **{"content-encoding": "gzip"}))[0] == 200


async def test_the_loop_goes_on_while_a_large_body_is_decoded(site: Open) -> None:
    here = await site()
    body = packed(prompt="x" * (40 << 20))
    decoding = asyncio.create_task(here.post(body, **{"content-encoding": "gzip"}))
    await until(lambda: here.app.ports.public.incoming_bytes > 1 << 20)
    assert (await here.get("/live"))[0] == 200
    await decoding


async def test_a_client_without_a_key_has_nothing_decoded(site: Open) -> None:
    here = await site(api_key=["sk-1"])
    status, _, _ = await here.post(b"no gzip", **{"content-encoding": "gzip"})
    assert status == 401


async def test_the_admin_api_takes_plain_bodies_alone(site: Open) -> None:
    here = await site(admin=True)
    sent = {"content-type": "application/json", "content-encoding": "gzip"}
    status, _, answer = await here.post(gzip.compress(b'{"url": "http://d:1"}'), "/workers", **sent)
    assert (status, "Content-Encoding" in json.loads(answer)["error"]["message"]) == (415, True)


async def test_the_document_of_the_router_names_the_refusal(site: Open) -> None:
    here = await site()
    document = json.loads((await here.get("/openapi.json"))[1])
    assert "415" in document["paths"][COMPLETIONS]["post"]["responses"]
