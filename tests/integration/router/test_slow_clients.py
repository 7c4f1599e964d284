"""Clients may be as slow as the settings say."""

import asyncio

import pytest
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, metric, text

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    ("setting", "sent", "answer"),
    [
        ("keep_alive_timeout_s", b"", b""),
        ("client_header_timeout_s", HEAD, b"HTTP/1.1 408"),
        ("client_body_timeout_s", HEAD + b"content-length: 9\r\n\r\n{", b"HTTP/1.1 408"),
    ],
)
async def test_a_connection_ends_when_the_client_has_said_nothing_for_so_long(
    site: Open, setting: str, sent: bytes, answer: bytes
) -> None:
    here = await site(**{setting: 0.02})
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(sent)
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(answer)
    writer.close()
    await writer.wait_closed()


async def test_an_answer_ends_when_the_client_has_read_nothing_for_so_long(site: Open) -> None:
    here = await site(0, 1, send_timeout_s=0.02)
    engine = here.decode[0]
    engine.events, engine.event_bytes = 64, 1 << 20
    async with here.http.post(here.url("/v1/completions"), json=text(stream=True)) as answer:
        assert answer.status == 200
        await until(lambda: not here.app.core.metrics.running)
        answer.close()
    assert await metric(here, 'kvrouter:request_errors_total{code="499",model="m"}') == 1
