"""Engines that prefill and decode as their family does, and note every rule that is broken.

What an engine says depends on the KV of its prompt and on what it said, so that wrong KV is wrong
text. KV here is the prompt's token ids as bytes: computed, or had from another engine in the way of
the family. `violations` must stay empty: a real engine would have crashed, hung, stranded memory
or answered from somebody else's KV.

Requests are judged by kvrouter.tools.sim.requests, whose rules are vLLM's (tests/vllm holds both to
the
same cases). This base is an engine that computes all itself: vLLM with a store-type connector whose
store has nothing, and, with `api` "openai", any server of OpenAI's API.

Data-parallel ranks, by vLLM 0.32: entrypoints/generate/base/serving.py `_get_data_parallel_rank`
takes X-data-parallel-rank where it is an integer; v1/engine/input_processor.py refuses one out of
range (400); without it v1/engine/core_client.py `get_core_engine_for_request` spreads requests.
v1/metrics/loggers.py labels metrics with the ranks' numbers, which with --data-parallel-hybrid-lb
begin with the first of this server, while the header counts from 0.
"""

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, ClassVar

from kvrouter.errors import ApiError, bad_request
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes
from kvrouter.openai.request import Kind
from kvrouter.openai.sse import DONE_EVENT
from kvrouter.tools.sim.answers import SimAnswer, Writer
from kvrouter.tools.sim.requests import GenerateRequest, parse_request, parse_tokenize
from kvrouter.tools.sim.tokenizer import SimTokenizer

Json = dict[str, Any]
Routed = list[tuple[str, str, Callable[[Exchange], Awaitable[None]]]]
PATIENCE_S = 10.0
MAX_LEN = 8192
MODEL = "m"
GARBAGE = b"memory of somebody else"
DEAD = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\n'


def kv_of(prompt: list[int]) -> bytes:
    """The KV of a prompt."""
    return array("I", prompt).tobytes()


class Network:
    """Where engines of one test find each other: what RDMA and side channels are elsewhere."""

    def __init__(self) -> None:
        self.engines: dict[str, PdEngine] = {}


class PdEngine:
    """One engine on a free port.

    Attributes:
        role: "prefill", "decode" or "both".
        mode: "ok"; "500"; "drop" (the connection breaks); "drop_mid" (after two events, or within
            the answer); "drop_end" (after a stream's end mark); "error_mid" (two events, then an
            error event); "hang"; "hang_mid" (two events, then nothing); "held" (waits for `go`);
            "says" (what `says` answers, also to endpoints without legs).
        thawed: while not set, it answers nothing that is asked from then on.
        requests: bodies of completions and chats but for introductions, with `headers` beside.
        began: their bodies as they begin; `computed`: prompts whose KV was computed here.
        live: requests under way.
        ranks: data-parallel ranks, numbered from `first_rank`; `ranks_of` the requests, as above.
        violations: rules that were broken.
    """

    family: ClassVar[str] = "store"
    api: ClassVar[str] = "vllm"
    owner: ClassVar[str] = "vllm"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        self.network = network
        self.role = role
        self.name = name or f"engine-{len(network.engines)}"
        network.engines[self.name] = self
        self.mode = "ok"
        self.go = asyncio.Event()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.says: Callable[[Exchange], Awaitable[None]] = _lost_for_words
        self.passed = 0
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.began: asyncio.Queue[Json] = asyncio.Queue()
        self.computed = 0
        self.live = 0
        self.ranks = 1
        self.first_rank = 0
        self.ranks_of: list[int] = []
        self._rank_of: dict[int, int] = {}
        self._id_of: dict[int, str] = {}
        self.version = "0.32.0"
        self._turn = 0
        self.violations: list[str] = []
        self.port = 0
        self._tokenizer = SimTokenizer()
        self._server: HttpServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def held(self) -> dict[str, object]:
        """What it keeps for others; empty when nothing is under way."""
        return {}

    async def start(self) -> None:
        routes = Routes(self.routes())

        async def handle(exchange: Exchange) -> None:
            await self.thawed.wait()
            await routes.handle(exchange)

        self._server = HttpServer(handle, Limits(tick_s=0.02))
        self.port = await self._server.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def next_began(self) -> Json:
        async with asyncio.timeout(PATIENCE_S):
            return await self.began.get()

    def routes(self) -> Routed:
        routes: Routed = [
            ("GET", "/v1/models", self._models),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chats),
            ("POST", "/v1/embeddings", self._passed_through),
            ("POST", "/v1/responses", self._passed_through),
        ]
        if self.api != "openai":
            routes += [("GET", "/health", self._health), ("POST", "/tokenize", self._tokenize)]
        if self.api == "vllm":
            routes += [("GET", "/version", self._version), ("GET", "/metrics", self._metrics)]
        return routes

    # -- what a family does in its own way

    def metrics(self) -> bytes:
        page = 'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
        for number in range(self.first_rank, self.first_rank + self.ranks):
            page += f'vllm:num_requests_running{{engine="{number}",model_name="{MODEL}"}} 0.0\n'
        return page.encode()

    def rank(self, exchange: Exchange, body: Json) -> int:
        """The data-parallel rank that a request goes to; raises ApiError if there is none."""
        given = exchange.headers.get("x-data-parallel-rank", "")
        if not given.lstrip("-").isdecimal():
            return self.spread(body)
        if not 0 <= int(given) < self.ranks:
            range_ = f"[0, {self.ranks})"
            raise bad_request(f"data_parallel_rank {given} is out of range {range_}.")
        return int(given)

    def spread(self, body: Json) -> int:
        """The rank of a request that names none."""
        self._turn += 1
        return self._turn % self.ranks

    def id_of(self, body: Json) -> str:
        """The `x-request-id` of a request; empty where it has none."""
        return self._id_of.get(id(body), "")

    def ended(self, body: Json) -> None:
        """A request is over, however it ended."""

    def rank_of(self, body: Json) -> int:
        """The rank on which a request is."""
        return self._rank_of[id(body)]

    def refuse(self, body: Json) -> None:
        """Raise ApiError for what this family refuses beyond vLLM's rules."""

    async def refused(self, body: Json) -> None:
        """A request was refused after it had been read."""

    def choices(self, request: GenerateRequest) -> list[GenerateRequest]:
        """A request for each choice, with its own seed."""
        return request.choices()

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        """The KV of the request's prompt, computed or had from elsewhere."""
        return self.compute(request)

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        """All tokens are there; returns the answer's `kv_transfer_params`."""
        return None

    def compute(self, request: GenerateRequest) -> bytes:
        self.computed += 1
        return kv_of(request.prompt)

    # -- HTTP

    async def _health(self, exchange: Exchange) -> None:
        exchange.respond(200)

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, json.dumps({"version": self.version}).encode())

    async def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, self.metrics())

    async def _models(self, exchange: Exchange) -> None:
        card = {"id": MODEL, "object": "model", "max_model_len": MAX_LEN, "owned_by": self.owner}
        exchange.respond(200, json.dumps({"object": "list", "data": [card]}).encode())

    async def _tokenize(self, exchange: Exchange) -> None:
        tokens = parse_tokenize(exchange.body, self._tokenizer, (MODEL,))
        exchange.respond(200, json.dumps({"count": len(tokens), "tokens": tokens}).encode())

    async def _completions(self, exchange: Exchange) -> None:
        await self._serve(exchange, "completion")

    async def _chats(self, exchange: Exchange) -> None:
        await self._serve(exchange, "chat")

    async def _passed_through(self, exchange: Exchange) -> None:
        self.passed += 1
        await self._delay({}, self.mode)
        if self.mode == "drop":
            exchange.abort()
        elif self.mode == "says":
            await self.says(exchange)
        else:
            exchange.respond(200, b'{"data": []}')

    async def _serve(self, exchange: Exchange, kind: Kind) -> None:
        body: Json = json.loads(exchange.body)
        probe = body.get("prompt") == [1] and body.get("max_tokens") == 1
        self.live += 1
        self._id_of[id(body)] = exchange.headers.get("x-request-id", "")
        try:
            try:
                request = parse_request(body, kind, self._tokenizer, (MODEL,), MAX_LEN)
                self.refuse(body)
                self._rank_of[id(body)] = self.rank(exchange, body)
            except ApiError as error:
                await self.refused(body)
                exchange.respond(error.status, error.body())
                return
            if not probe:
                self.requests.append(body)
                self.headers.append(exchange.headers)
                self.ranks_of.append(self.rank_of(body))
                self.began.put_nowait(body)
            await self._generate(exchange, body, request, "ok" if probe else self.mode)
        finally:
            self.ended(body)
            self._rank_of.pop(id(body), None)
            self._id_of.pop(id(body), None)
            self.live -= 1

    async def _generate(
        self, exchange: Exchange, body: Json, request: GenerateRequest, mode: str
    ) -> None:
        if mode in ("500", "drop", "says"):
            await self.refused(body)
            if mode == "drop":
                exchange.abort()
            elif mode == "says":
                await self.says(exchange)
            else:
                self.fail(exchange, request, "CUDA error")
            return
        await self._delay(body, mode)
        answers = [SimAnswer(one, 0, None) for one in self.choices(request)]
        try:
            kvs = [await self.kv(body, answer.request) for answer in answers[:: request.n]]
        except LoadFailed as error:
            self.fail(exchange, request, str(error))
            return
        if request.stream:
            await self._stream(exchange, body, request, answers, kvs, mode)
            return
        for at, answer in enumerate(answers):
            for _ in range(request.max_tokens or 16):
                self.say(answer, kvs[at // request.n])
        answers[0].kv_transfer_params = self.finish(body, answers[0].request, kvs[0])
        if mode == "hang_mid":
            await asyncio.Event().wait()
        if mode == "drop_mid":
            exchange.start(200)
            exchange.write(b'{"id": "c')
            exchange.abort()
            return
        exchange.respond(200, self.whole(request, answers))

    async def _stream(  # noqa: PLR0917
        self,
        exchange: Exchange,
        body: Json,
        request: GenerateRequest,
        answers: list[SimAnswer],
        kvs: list[bytes],
        mode: str,
    ) -> None:
        writer = Writer(request)
        exchange.start(200, SSE_HEADERS)
        for at in range(len(answers)):
            exchange.write(writer.opening(at))
        count = request.max_tokens or 16
        for i in range(count):
            if i == 2 and mode == "drop_mid":
                exchange.abort()
                return
            if i == 2 and mode == "hang_mid":
                await asyncio.Event().wait()
            if i == 2 and mode == "error_mid":
                exchange.write(DEAD + DONE_EVENT)
                exchange.end()
                return
            for at, answer in enumerate(answers):
                token, text = self.say(answer, kvs[at // request.n])
                exchange.write(writer.token(at, answer, token, text, i == count - 1))
            await exchange.drain()
        self.finish(body, answers[0].request, kvs[0])
        exchange.write(writer.closing(answers))
        if mode == "drop_end":
            exchange.abort()
        exchange.end()

    async def _delay(self, body: Json, mode: str) -> None:
        if mode == "hang":
            await self.stall(body)
        if mode == "held":
            await self.go.wait()

    async def stall(self, body: Json) -> None:
        """Answer nothing, ever; the request is in the engine."""
        await asyncio.Event().wait()

    def fail(self, exchange: Exchange, request: GenerateRequest, message: str) -> None:
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        exchange.respond(500, json.dumps({"error": error}).encode())

    def whole(self, request: GenerateRequest, answers: list[SimAnswer]) -> bytes:
        return Writer(request).body(answers)

    def say(self, answer: SimAnswer, kv: bytes) -> tuple[int, str]:
        """The next token: of the KV, of those that were said, and of the seed."""
        seen = kv + array("I", answer.tokens).tobytes()
        if answer.request.seed is not None:
            seen += b"%d" % answer.request.seed
        number = int.from_bytes(sha256(seen).digest()[:4])
        token = self._tokenizer.syllable(number)
        text = self._tokenizer.decode((token,))
        answer.tokens.append(token)
        answer.text += text
        return token, text


async def _lost_for_words(exchange: Exchange) -> None:
    exchange.abort()


class PlainEngine(PdEngine):
    """Any server of OpenAI's API: no /health, no /version, nothing to hand over."""

    family: ClassVar[str] = "openai"
    api: ClassVar[str] = "openai"
    owner: ClassVar[str] = "somebody"


class LoadFailed(Exception):
    """KV that was to come did not: the request ends with a 500 (`kv_load_failure_policy` fail)."""
