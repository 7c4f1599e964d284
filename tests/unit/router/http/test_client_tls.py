"""The client of engines over HTTPS: whom it believes, and how long it waits to be convinced."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority

from kvrouter.credentials.tls import client_context, server_context
from kvrouter.http.client.pool import ConnectionPool, Deadlines, UpstreamError
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.http.failure import Failure
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer

LATER = Deadlines(connect_s=20, first_byte_s=20, idle_s=20)


class Sink:
    """Takes a body."""

    paused = False
    passer = None

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Engines:
    """HTTPS servers that stream what they are sent, and pools to them."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.servers: list[HttpServer] = []
        self.pools: list[ConnectionPool] = []
        self.peers: list[str] = []
        self.watch = DeadlineTimer(asyncio.get_running_loop(), 0.01)

    async def serve(self, *names: str, expired: bool = False) -> int:
        server = HttpServer(self._echo)
        shown = self.authority.sign(*names, expired=expired)
        self.servers.append(server)
        return await server.listen("127.0.0.1", 0, tls=server_context(*shown, ""))

    def pool(
        self, port: int, host: str = "127.0.0.1", ca_file: str | None = None
    ) -> ConnectionPool:
        context = client_context(self.authority.ca_file if ca_file is None else ca_file)
        made = ConnectionPool(host, port, self.watch, tls=lambda: context)
        self.pools.append(made)
        return made

    async def _echo(self, exchange: Exchange) -> None:
        self.peers.append(exchange.peer)
        exchange.start(200)
        for at in range(0, len(exchange.body), 70_000):
            exchange.write(exchange.body[at : at + 70_000])
            await exchange.drain()
        exchange.end()


@pytest_asyncio.fixture
async def engines(authority: Authority) -> AsyncIterator[Engines]:
    made = Engines(authority)
    yield made
    for pool in made.pools:
        pool.close()
    for server in made.servers:
        await server.close()
    made.watch.close()


async def test_requests_and_streams_pass_over_a_connection_that_is_kept(engines: Engines) -> None:
    pool = engines.pool(await engines.serve())
    body = bytes(range(256)) * 4_000
    for _ in range(3):
        answer = await pool.send("POST", "/", body=(body[:10], body[10:]), deadlines=LATER)
        sink = Sink()
        await answer.relay_to(sink, 20)
        assert sink.data == body
    assert len(set(engines.peers)) == 1
    assert pool.idle == 1


async def refusal(pool: ConnectionPool, deadlines: Deadlines = LATER) -> str:
    with pytest.raises(UpstreamError) as told:
        await pool.send("POST", "/", body=(b"secret",), deadlines=deadlines)
    assert told.value.failure is Failure.CONNECT
    return str(told.value)


async def test_who_is_not_who_he_should_be_is_told_nothing(
    engines: Engines, tmp_path: Path
) -> None:
    port = await engines.serve()
    stranger = Authority(tmp_path, "stranger")
    assert "CERTIFICATE_VERIFY_FAILED" in await refusal(
        engines.pool(port, ca_file=stranger.ca_file)
    )
    assert "CERTIFICATE_VERIFY_FAILED" in await refusal(engines.pool(port, ca_file=""))
    elsewhere = await engines.serve("engine.example", "10.0.0.1")
    assert "not valid for" in await refusal(engines.pool(elsewhere))
    expired = await engines.serve(expired=True)
    assert "expired" in await refusal(engines.pool(expired))
    assert engines.peers == []


async def test_a_name_is_checked_as_it_was_given(engines: Engines) -> None:
    pool = engines.pool(await engines.serve("localhost"), host="localhost")
    answer = await pool.send("POST", "/", body=(b"x",), deadlines=LATER)
    assert await answer.read(100, 20) == b"x"


def all_of(connected: socket.socket) -> bytes:
    """What comes until the other end closes; blocks."""
    with connected:
        connected.settimeout(20)
        try:
            return b"".join(iter(lambda: connected.recv(65536), b""))
        except ConnectionResetError:
            return b""


async def test_a_handshake_that_does_not_end_is_given_up(engines: Engines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = engines.pool(silent.getsockname()[1])
        soon = Deadlines(connect_s=0.2, first_byte_s=20, idle_s=20)
        assert await refusal(pool, soon) == "no connection within 0.2 s"
        said = await asyncio.to_thread(all_of, silent.accept()[0])  # its hello, and then the end
    assert said.startswith(b"\x16\x03") or not said


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100, b""])
async def test_what_is_no_tls_fails(engines: Engines, said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pool = engines.pool(server.sockets[0].getsockname()[1])
    assert (await refusal(pool)).startswith("no connection")
    server.close()


async def test_a_call_that_is_cancelled_in_the_handshake_leaves_nothing(engines: Engines) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = engines.pool(silent.getsockname()[1])
        asking = asyncio.create_task(pool.send("POST", "/", deadlines=LATER))
        connected, _ = await asyncio.to_thread(silent.accept)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(all_of, connected)
    assert pool.idle == 0
