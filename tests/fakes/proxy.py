"""An HTTP proxy on loopback that makes tunnels, or answers something else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Answers CONNECT; a tunnel leads where it asks.

    Attributes:
        answer: in place of a tunnel; b"": makes tunnels.
        heads: of the requests.
        port: where it listens.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            if self.answer:
                writer.write(self.answer)
                await writer.drain()
                return
            host, _, port = head.split()[1].rpartition(":")
            inner, outer = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_pass(reader, outer), _pass(inner, writer))
        finally:
            writer.close()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while chunk := await source.read(1 << 16):
            sink.write(chunk)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


@asynccontextmanager
async def proxy(answer: bytes = b"") -> AsyncIterator[Proxy]:
    """A proxy that listens; its connections end with those of its clients."""
    made = Proxy(answer)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
