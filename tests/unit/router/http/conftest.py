"""Servers on free ports, and a client that writes raw bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import Handler, HttpServer

Serve = Callable[..., Awaitable[HttpServer]]
Dial = Callable[[HttpServer], Awaitable["Wire"]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers on free ports and closes them."""
    servers: list[HttpServer] = []

    async def start(handler: Handler, **limits: float) -> HttpServer:
        server = HttpServer(handler, Limits(tick_s=0.01, **limits))  # type: ignore[arg-type]
        await server.listen("127.0.0.1", 0)
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()
        assert server.connections == 0


@pytest_asyncio.fixture
async def dial() -> AsyncIterator[Dial]:
    """Opens raw clients and closes them."""
    wires: list[Wire] = []

    async def connect(server: HttpServer) -> Wire:
        wire = await Wire.dial(server.port)
        wires.append(wire)
        return wire

    yield connect
    for wire in wires:
        wire.close()


async def hello(exchange: Exchange) -> None:
    exchange.respond(200, b'"hello"')


class Wire:
    """A client that writes raw bytes and reads whole HTTP answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def dial(cls, port: int) -> "Wire":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(10):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def body(self, headers: dict[str, str]) -> bytes:
        async with asyncio.timeout(10):
            if "content-length" in headers:
                return await self.reader.readexactly(int(headers["content-length"]))
            if headers.get("transfer-encoding") != "chunked":
                return await self.reader.read()
            parts = []
            while size := int(await self.reader.readline(), 16):
                parts.append(await self.reader.readexactly(size))
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
            return b"".join(parts)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, await self.body(headers)

    async def at_end(self) -> bool:
        async with asyncio.timeout(10):
            return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.transport.abort()


GET = b"GET /x?y=1 HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (
        extra,
        len(body),
        body,
    )
