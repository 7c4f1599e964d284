"""A Mooncake master and a coordinator of LMCache that know what a test told them; HTTP alone.

`tests/contract/stores` holds them to the real ones.
"""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from typing import Any

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer

Json = dict[str, Any]


class FakeForeignStore(ABC):
    """One on a free port.

    Attributes:
        keys: what it holds, as its own questions name it.
        questions: how many it was asked, besides that for its health.
        answers: while not set, it answers nothing.
        garbage: what it answers instead, with the status.
        wrong: whether it is another server, which has none of the pages.
        asked: is set by every question.
    """

    scheme = ""
    health = ""

    def __init__(self, options: str = "") -> None:
        self.options = options
        self.port = 0
        self.keys: set[str] = set()
        self.questions = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.garbage: tuple[int, bytes] | None = None
        self.wrong = False
        self.asked = asyncio.Event()
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{self.options}"

    async def start(self) -> None:
        """Idempotent."""
        if self._server is not None:
            return
        limits = Limits(tick_s=0.02, head_bytes=1 << 20, url_bytes=1 << 20)
        self._server = HttpServer(self._handle, limits)
        self.port = await self._server.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _handle(self, exchange: Exchange) -> None:
        healthy = exchange.path + (f"?{exchange.query}" if exchange.query else "") == self.health
        if not healthy:
            self.questions += 1
            self.asked.set()
        await self.answers.wait()
        if self.wrong:
            exchange.respond(404, b"{}")
            return
        if self.garbage is not None and not healthy:
            exchange.respond(*self.garbage)
            return
        exchange.respond(200, json.dumps(self.answer(exchange)).encode())

    @abstractmethod
    def answer(self, exchange: Exchange) -> Json: ...


class FakeMaster(FakeForeignStore):
    """Mooncake's: mooncake-store/src/master_admin_service.cpp, `/batch_query_keys`."""

    scheme = "mooncake"
    health = "/batch_query_keys?keys=-"

    def answer(self, exchange: Exchange) -> Json:
        asked = exchange.query.removeprefix("keys=").split(",")
        return {"success": True, "data": {key: {"ok": key in self.keys} for key in asked}}


class FakeCoordinator(FakeForeignStore):
    """LMCache's: mp_coordinator/http_apis/directory_api.py, `/directory/lookup`.

    `keys` are what `hold` was given.
    """

    scheme = "lmcache"
    health = "/directory/stats"

    def __init__(self, options: str = "", chunk_tokens: int = 256) -> None:
        super().__init__(options)
        self.chunk_tokens = chunk_tokens
        self.bodies: list[Json] = []

    def answer(self, exchange: Exchange) -> Json:
        if exchange.path == self.health:
            return {}
        body = json.loads(exchange.body)
        self.bodies.append(body)
        keys = body.get("keys") or self.keys_of(body)
        results = [
            {
                "key": key,
                "placements": [{"instance_id": "a", "tier": "l1", "backend": "dram"}]
                if json.dumps(key, sort_keys=True) in self.keys
                else [],
                "token_ids": [],
                "access_count": 0,
            }
            for key in keys
        ]
        chunks = len(body.get("token_ids", ())) // self.chunk_tokens or len(keys)
        return {"chunks": chunks if keys else 0, "results": results}

    def hold(self, key: Json) -> None:
        """From now on it holds that key."""
        self.keys.add(json.dumps(key, sort_keys=True))

    def keys_of(self, body: Json) -> list[Json]:
        """The keys of a prompt, by chunk and rank."""
        ids, name, names = body["token_ids"], b"", []
        for end in range(self.chunk_tokens, len(ids) + 1, self.chunk_tokens):
            tokens = json.dumps(ids[end - self.chunk_tokens : end]).encode()
            name = hashlib.sha256(name + tokens).digest()
            names.append(name.hex())
        return [
            {
                "chunk_hash_hex": chunk,
                "model_name": body["model_name"],
                "kv_rank": rank,
                "object_group_id": 0,
                "cache_salt": body["cache_salt"],
            }
            for chunk in names
            for rank in range(body["world_size"])
        ]
