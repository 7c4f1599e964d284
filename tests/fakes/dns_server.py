"""A DNS server on loopback, UDP and TCP, whose zone a test changes; it can fail, or be away."""

import asyncio
import socket
from contextlib import suppress
from typing import Literal, cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

UDP_BYTES = 512

Mood = Literal["answers", "fails", "silent"]


class DnsServer:
    """Answers with authority for whatever it is asked.

    Attributes:
        mood: "fails" answers SERVFAIL, "silent" nothing.
        port: of UDP and TCP; the same after `stop` and `start`.
        asked: how many questions came.
    """

    def __init__(self, ttl_s: int = 1) -> None:
        self.mood: Mood = "answers"
        self.port = 0
        self.asked = 0
        self._ttl_s = ttl_s
        self._zone: dict[tuple[dns.name.Name, str], list[str]] = {}
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    @property
    def resolver(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, name: str, kind: str, *records: str) -> None:
        """The records of that name and kind from now on; none: it has none of that kind."""
        self._zone[dns.name.from_text(name), kind] = list(records)

    def forget(self, name: str) -> None:
        """From now on there is no such name."""
        for key in [key for key in self._zone if key[0] == dns.name.from_text(name)]:
            del self._zone[key]

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(20):  # a port that is free for TCP may be taken for UDP
            self._tcp = await asyncio.start_server(self._stream, "127.0.0.1", self.port)
            port = self._tcp.sockets[0].getsockname()[1]
            with suppress(OSError):
                self._udp, _ = await loop.create_datagram_endpoint(
                    lambda: _Datagrams(self), ("127.0.0.1", port), family=socket.AF_INET
                )
                self.port = port
                return
            self._tcp.close()
        raise RuntimeError("no port is free for both UDP and TCP")

    async def stop(self) -> None:
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()
            await self._tcp.wait_closed()
        self._udp = self._tcp = None

    def answer(self, question: bytes, limit: int) -> bytes | None:
        self.asked += 1
        if self.mood == "silent":
            return None
        query = dns.message.from_wire(question)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA | dns.flags.RA
        name, kind = query.question[0].name, dns.rdatatype.to_text(query.question[0].rdtype)
        records = self._zone.get((name, kind), [])
        if self.mood == "fails":
            response.set_rcode(dns.rcode.SERVFAIL)
        elif records:
            response.answer.append(dns.rrset.from_text_list(name, self._ttl_s, "IN", kind, records))
        elif not any(key[0] == name for key in self._zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        wire = response.to_wire(max_size=65535)
        if len(wire) <= limit:
            return wire
        response.answer.clear()
        response.flags |= dns.flags.TC
        return response.to_wire()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                answer = self.answer(await reader.readexactly(size), 65535)
                if answer is not None:
                    writer.write(len(answer).to_bytes(2, "big") + answer)
                    await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # uvloop's is its own class

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, UDP_BYTES)
        if answer is not None:
            self._transport.sendto(answer, addr)
