"""An engine in vLLM's dialect that does as a test says: answers, hangs, dies; tells who left."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes
from kvrouter_store.identity.chain import root_hash

if TYPE_CHECKING:
    import ssl

Json = dict[str, Any]
BLOCK_TOKENS = 16
PATIENCE_S = 10.0


class FakeEngine:
    """One engine on a free port of `host`.

    Attributes:
        mode: what it does with a completion: "ok"; "500"; "drop" (the connection breaks before the
            answer); "drop_head" (after the head, before a byte); "drop_mid" (after two events, or
            half an answer); "hang" (never answers); "hang_mid" (two events, then nothing);
            "garbage"; "held" (answers once `go` is set, in the mode of that time).
        healthy: while not set, its health check does not answer.
        waits: whether it says that it waits for KV which it is told is coming.
        requests: bodies of completions and chats, in order; `headers` stand beside them.
        began: every completion's body as it begins.
        left: a mark for every completion whose client left before its end.
        manifest: hex digest that its connector hands over, with the prompt's whole blocks.
        connector: more of what its connector says, or something else than usual.
        node: URL of the store node that its connector writes to, as it says.
        connections: how many connections were ever made to it.
        piece_bytes: streams come in chunks of so many bytes, wherever events end; 0: by event.
        skew: how many tokens it counts more than the prompt has.
        pages: what answers a POST to other paths, by path; bodies of these are in `posted`,
            headers in `posted_headers`.
        endpoints: what /openapi.json lists, and all that a POST may ask for; None: there is no such
            page, and everything may be asked.
        salted: paths whose bodies have a `cache_salt` on that page.
        adapters: paths of the LoRA adapters that it has loaded, by name.
        told: more members of every answer and event.
        reason: why it says that generation has ended.
        key: what it wants to be shown, on every path; None: nothing.
        asked: path and Authorization of every request, in order.
        tls: what it shows to who connects; None: it is plain.
    """

    def __init__(self, model: str = "m", host: str = "127.0.0.1") -> None:
        self.model = model
        self.host = host
        self.mode = "ok"
        self.manifest: str | None = None
        self.connector: Json = {}
        self.waits = False
        self.node: str | None = None
        self.go = asyncio.Event()
        self.healthy = asyncio.Event()
        self.healthy.set()
        self.cached_tokens: int | None = None
        self.event_bytes = 0
        self.piece_bytes = 0
        self.events: int | None = None
        self.endpoints: tuple[str, ...] | None = None
        self.adapters: dict[str, str] = {}
        self.told: Json = {}
        self.reason: Any = "length"
        self.pages: dict[str, Callable[[Exchange], Awaitable[None]]] = {}
        self.salted: tuple[str, ...] = ()
        self.posted: list[tuple[str, bytes]] = []
        self.posted_headers: list[dict[str, str]] = []
        self.skew = 0
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.began: asyncio.Queue[Json] = asyncio.Queue()
        self.left: asyncio.Queue[None] = asyncio.Queue()
        self.paused = asyncio.Event()
        self.peers: set[str] = set()
        self.port = 0
        self.key: str | None = None
        self.asked: list[tuple[str, str | None]] = []
        self.tls: ssl.SSLContext | None = None
        self._server: HttpServer | None = None
        self._routes = Routes(
            [
                ("GET", "/health", self._health),
                ("GET", "/version", self._version),
                ("GET", "/openapi.json", self._openapi),
                ("GET", "/v1/models", self._models),
                ("POST", "/tokenize", self._tokenize),
                ("POST", "/v1/completions", self._completions),
                ("POST", "/v1/chat/completions", self._completions),
            ]
        )

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def open_connections(self) -> int:
        return self._server.connections if self._server is not None else 0

    async def start(self) -> None:
        self._server = HttpServer(self._handle, Limits(tick_s=0.02))
        self.port = await self._server.listen(self.host, self.port, tls=self.tls)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def next_began(self) -> Json:
        async with asyncio.timeout(PATIENCE_S):
            return await self.began.get()

    async def next_left(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.left.get()

    async def _handle(self, exchange: Exchange) -> None:
        shown = exchange.headers.get("authorization")
        self.asked.append((exchange.path, shown))
        if self.key is not None and shown != f"Bearer {self.key}":
            exchange.respond(401, b'{"error": "Unauthorized"}')
            return
        try:
            await self._serve(exchange)
        except asyncio.CancelledError:
            if not exchange.closed:  # it stops as an engine that dies: without a word
                exchange.abort()
            raise

    async def _serve(self, exchange: Exchange) -> None:
        if (
            self.endpoints is not None
            and exchange.method == "POST"
            and exchange.path not in self.endpoints
        ):
            error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}
            exchange.respond(404, json.dumps({"error": error}).encode())
            return
        page = self.pages.get(exchange.path)
        if page is None:
            await self._routes.handle(exchange)
            return
        self.posted.append((exchange.path, exchange.body))
        self.posted_headers.append(exchange.headers)
        try:
            await page(exchange)
        except asyncio.CancelledError:
            self.left.put_nowait(None)
            raise

    async def _health(self, exchange: Exchange) -> None:
        await self.healthy.wait()
        exchange.respond(200)

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, b'{"version": "0.32.0"}')

    async def _openapi(self, exchange: Exchange) -> None:
        if self.endpoints is None:
            exchange.respond(404, b'{"detail": "Not Found"}')
            return
        paths: Json = {path: {"post": {}} for path in ("/health", *self.endpoints)}
        schema = {"$ref": "#/components/schemas/Body"}
        taken = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
        paths |= {path: {"post": taken} for path in self.salted}
        schemas = {"Body": {"type": "object", "properties": {"cache_salt": {"type": "string"}}}}
        page = {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}
        exchange.respond(200, json.dumps(page).encode())

    async def _models(self, exchange: Exchange) -> None:
        cards: list[Json] = [{"id": self.model, "object": "model", "max_model_len": 4096}]
        for name, path in self.adapters.items():
            cards.append({"id": name, "object": "model", "root": path, "parent": self.model})
        exchange.respond(200, json.dumps({"object": "list", "data": cards}).encode())

    async def _tokenize(self, exchange: Exchange) -> None:
        ids = self._prompt_ids(json.loads(exchange.body))
        exchange.respond(200, json.dumps({"count": len(ids), "tokens": ids}).encode())

    async def _completions(self, exchange: Exchange) -> None:
        body: Json = json.loads(exchange.body)
        probe = body.get("prompt") == [1] and body.get("max_tokens") == 1
        if not probe:
            self.peers.add(exchange.peer)
            self.requests.append(body)
            self.headers.append(exchange.headers)
            self.began.put_nowait(body)
        try:
            await self._answer(exchange, body, "ok" if probe else self.mode)
        except asyncio.CancelledError:
            if exchange.closed:
                self.left.put_nowait(None)
            raise

    async def _answer(self, exchange: Exchange, body: Json, mode: str) -> None:
        if mode == "held":
            await self.go.wait()
            mode = self.mode
        problem = self._problem(body)
        if problem is not None:
            exchange.respond(problem[0], json.dumps({"error": problem[1]}).encode())
        elif mode == "500":
            exchange.respond(500, b'{"error": {"message": "CUDA error", "code": 500}}')
        elif mode == "drop":
            exchange.abort()
        elif mode == "hang":
            await asyncio.Event().wait()
        elif body.get("stream"):
            await self._stream(exchange, body, mode)
        else:
            self._whole(exchange, body, mode)

    def _problem(self, body: Json) -> tuple[int, Json] | None:
        """VLLM's own rules, those that a careless prefill leg breaks."""
        if body.get("model") not in (self.model, *self.adapters):
            message = f"The model `{body.get('model')}` does not exist."
            return 404, {"message": message, "type": "NotFoundError", "code": 404}
        if body.get("stream_options") and not body.get("stream"):
            return 400, {"message": "stream_options without stream", "code": 400}
        if (body.get("min_tokens") or 0) > (body.get("max_tokens") or 16):
            return 400, {"message": "min_tokens above max_tokens", "code": 400}
        if (body.get("temperature") or 0) > 2:
            return 400, {"message": "temperature above 2", "param": "temperature", "code": 400}
        return None

    async def _stream(self, exchange: Exchange, body: Json, mode: str) -> None:
        exchange.start(200, SSE_HEADERS)
        if mode == "drop_head":
            exchange.abort()
            return
        count = self.events if self.events is not None else body.get("max_tokens") or 16
        for i in range(count):
            if i == 2 and mode == "drop_mid":
                exchange.write(b'data: {"id": "half an ev')
                exchange.abort()
                return
            if i == 2 and mode == "hang_mid":
                await asyncio.Event().wait()
            self._write(exchange, self.event(i, last=i == count - 1))
            if exchange.paused:
                self.paused.set()
            await exchange.drain()
        if (body.get("stream_options") or {}).get("include_usage"):
            event = {"id": "cmpl-1", "choices": [], "usage": self.usage(body, count), **self.told}
            self._write(exchange, b"data: %b\n\n" % json.dumps(event).encode())
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    def _write(self, exchange: Exchange, event: bytes) -> None:
        size = self.piece_bytes or len(event)
        for at in range(0, len(event), size):
            exchange.write(event[at : at + size])

    def _whole(self, exchange: Exchange, body: Json, mode: str) -> None:
        if mode == "garbage":
            exchange.respond(200, b"not JSON")
            return
        if mode in ("drop_head", "drop_mid"):
            exchange.start(200)
            exchange.write(b"" if mode == "drop_head" else b'{"id": "c')
            exchange.abort()
            return
        exchange.respond(200, json.dumps(self.answer(body)).encode())

    def event(self, i: int, *, last: bool) -> bytes:
        choice = {"index": 0, "text": f" t{i}", "finish_reason": self.reason if last else None}
        event = {"id": "cmpl-1", "model": self.model, "choices": [choice], **self.told}
        if self.event_bytes:
            event["padding"] = "x" * self.event_bytes
        return b"data: %b\n\n" % json.dumps(event).encode()

    def answer(self, body: Json) -> Json:
        ids = self._prompt_ids(body)
        tokens = body.get("max_tokens") or 16
        text = "".join(f" t{i}" for i in range(tokens))
        choice: Json = {"index": 0, "text": text, "finish_reason": self.reason}
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text}
        answer: Json = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": self.model,
            "choices": [choice],
            "usage": self.usage(body, tokens),
            **self.told,
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = ids
        if self.manifest is not None:
            told: Json = {
                "manifest": self.manifest,
                "blocks": len(ids) // BLOCK_TOKENS,
                "block_tokens": BLOCK_TOKENS,
                "root": root_hash(None).hex(),
            }
            if self.waits:
                told["waits"] = True
            if self.node is not None:
                told["node"] = self.node
            told |= self.connector
            answer["kv_transfer_params"] = {"kvstore": told}
        return answer

    def usage(self, body: Json, tokens: int) -> Json:
        prompt = len(self._prompt_ids(body)) + self.skew
        usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + tokens}
        usage["completion_tokens"] = tokens
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def _prompt_ids(self, body: Json) -> list[int]:
        """One token per character."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            return [ord(c) for c in prompt]
        return [ord(c) for c in json.dumps(body.get("messages"))]


@asynccontextmanager
async def engines(
    count: int, model: str = "m", kind: type[FakeEngine] = FakeEngine
) -> AsyncIterator[list[FakeEngine]]:
    """That many engines, started."""
    made = [kind(model) for _ in range(count)]
    try:
        for engine in made:
            await engine.start()
        yield made
    finally:
        for engine in made:
            await engine.stop()
