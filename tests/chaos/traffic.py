"""The drill's clients: steady requests, clients that vanish, one that stops reading."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from time import monotonic
from typing import Any

import aiohttp
from tests.chaos.cluster import MODEL
from tests.chaos.judge import HUNG_S, Asked, End
from tests.chaos.requests import Requests, oracle


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _said(answer: dict[str, Any]) -> str:
    """The text of an answer or an event."""
    said = ""
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        said += choice.get("text") or message.get("content") or ""
    return said


class Traffic:
    """Sends requests to the router at `url`, and keeps their results.

    Args:
        http: what it asks with.
        url: the router's.
        requests: what it asks all the time.
        seed: of pauses.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, requests: Requests, seed: int
    ) -> None:
        self.asked: list[Asked] = []
        self.vanished = 0
        self._http = http
        self._url = url
        self._requests = requests
        self._draw = random.Random(seed)
        self._begun = monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the drill began."""
        return monotonic() - self._begun

    async def steady(self, rate: float, stop: asyncio.Event) -> None:
        """Send requests at `rate` per second until `stop`; returns when all have ended."""
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(self._ask(*self._next()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._draw.expovariate(rate)):
                        await stop.wait()

    def _next(self) -> tuple[Asked, dict[str, Any]]:
        one = self._requests.next()
        name, stream = f"request {len(self.asked)}", one.body["stream"]
        asked = Asked(name, stream, self.now_s, one.expected, resumable=one.resumable)
        self.asked.append(asked)
        return asked, one.body

    async def _ask(self, asked: Asked, body: dict[str, Any]) -> None:
        try:
            async with (
                asyncio.timeout(2 * HUNG_S),
                self._http.post(self._url + _path(body), json=body) as answer,
            ):
                if answer.status != 200:
                    asked.end, asked.said = End.REFUSED, f"{answer.status} {await answer.text()}"
                elif asked.stream:
                    await self._read(asked, answer.content)
                else:
                    asked.text, asked.end = _said(await answer.json()), End.WHOLE
        except TimeoutError:
            asked.end = End.HUNG
        except aiohttp.ClientError as error:
            asked.end, asked.said = End.CUT, repr(error)
        asked.ended_s = self.now_s

    async def _read(self, asked: Asked, lines: aiohttp.StreamReader | asyncio.StreamReader) -> None:
        asked.end = End.CUT
        async for line in lines:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                asked.end = End.ERROR_EVENT if asked.said else End.WHOLE
            elif data:
                event = json.loads(data)
                if "error" in event:
                    asked.said = event["error"]["message"]
                    continue
                asked.first_s = asked.first_s or self.now_s
                asked.text += _said(event)

    async def vanish(self, clients: int, seconds: float) -> None:
        """Send that many requests whose clients leave, mostly before the end of the answer."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._vanish_one(self._draw.uniform(0, seconds)))

    async def _vanish_one(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        ids = [self._draw.randrange(50_000) for _ in range(self._draw.randint(5, 200))]
        body = {"model": MODEL, "prompt": ids, "max_tokens": 400, "stream": True}
        _, writer = await self._send(body)
        await asyncio.sleep(self._draw.uniform(0, 0.4) if self._draw.random() < 0.9 else 0)
        if self._draw.random() < 0.5:  # a reset instead of an end
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.vanished += 1

    async def stop_reading(self, resume: asyncio.Event) -> None:
        """A client begins to read a long stream, then pauses until `resume`."""
        asked = Asked("the client that stops reading", stream=True, begun_s=self.now_s)
        self.asked.append(asked)
        ids, tokens = [7, *range(60)], 900
        asked.expected = oracle().text(ids, tokens)
        body = {"model": MODEL, "prompt": ids, "max_tokens": tokens, "stream": True}
        body["temperature"] = 0
        reader, writer = await self._send(body)
        await reader.readuntil(b"\r\n\r\n")
        await resume.wait()
        asked.idle_s = self.now_s - asked.begun_s
        try:
            async with asyncio.timeout(HUNG_S):
                await self._read(asked, reader)
        except TimeoutError:
            asked.end = End.HUNG
        asked.ended_s = self.now_s
        writer.close()

    async def _send(
        self, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on its own connection, with an answer without chunks and a small buffer."""
        host, port = self._url.rpartition("//")[2].split(":")
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=own, limit=4096)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer
