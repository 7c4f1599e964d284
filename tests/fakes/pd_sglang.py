"""SGLang in prefill/decode disaggregation, by the rules of SGLang 0.5.23's own source.

Under sglang/srt/:
- managers/scheduler.py: a disaggregated engine refuses (400) a request without bootstrap_room.
- disaggregation/prefill.py: max_new_tokens is set to 1; the request is answered when its KV has
  been sent (inflight queue); the first token is sampled here, and decode.py takes it over from the
  metadata buffers: both bodies must say the same of sampling.
- disaggregation/common/conn.py `CommonKVSender`: a room that is open already fails ("Duplicate or
  cancelled bootstrap room"); without its peer a leg waits 300 s (environ.py:
  SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, SGLANG_DISAGGREGATION_WAITING_TIMEOUT).
- disaggregation/decode.py `_bootstrap_addr`: NetworkAddress(bootstrap_host, bootstrap_port); the
  bootstrap server is asked GET /route?prefill_dp_rank=-1&.. first (`try_ensure_parallel_info`).
- entrypoints/openai/serving_completions.py `_generate_completion_stream`: a failure of a stream is
  an event with an error object within a 200; managers/tokenizer_manager.py
  `_handle_abort_finish_reason`: that of a whole answer is a status.
- entrypoints/openai/serving_completions.py names the tokens of a stream's events where it is asked
  (`return_token_ids`); serving_chat.py refuses that of a stream.
- managers/io_struct.py `_expand_inputs`: n samples have one seed (`sampling_params * n`).
- Data-parallel ranks: entrypoints/openai/serving_base.py `extract_routed_dp_rank_from_header` (the
  header wins over the body), managers/tokenizer_manager.py (out of range: 400),
  managers/data_parallel_controller.py (without one room % ranks on a prefill engine, the next in
  turn on others); common/conn.py `CommonKVSender` fails a request whose rank is not room % ranks
  unless it has disagg_prefill_dp_rank; decode.py `_resolve_prefill_dp_rank` looks for it there.
- entrypoints/http_server.py `server_info`; there is no /version.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import ClassVar

import aiohttp
from tests.fakes.patience import until
from tests.fakes.pd import Json, LoadFailed, Network, PdEngine, Routed

from kvrouter.errors import bad_request
from kvrouter.http.headers import SSE_HEADERS
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes
from kvrouter.tools.sim.answers import SimAnswer
from kvrouter.tools.sim.requests import GenerateRequest

_OF_LEG = ("stream", "stream_options", "return_token_ids")


@dataclass
class _Room:
    body: Json
    rank: int
    peer: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    kv: bytes = b""


class SglangEngine(PdEngine):
    """One engine; of role "both" it is not disaggregated.

    Attributes:
        rooms: of a prefill engine: requests that wait for their decode engine, or are being sent.
        waiting: of a decode engine: rooms in which it waits.
        fetched: prompts whose KV this engine had from others.
        bootstrap_port: of its bootstrap server; `host` is where that listens.
        page_size: of its cache; with more than 1 it says that it publishes KV events.
    """

    family: ClassVar[str] = "sglang"
    api: ClassVar[str] = "sglang"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        super().__init__(network, role, name)
        self.rooms: dict[int, _Room] = {}
        self.waiting: set[int] = set()
        self.fetched = 0
        self.host = "127.0.0.1"
        self.bootstrap_port = 0
        self.page_size = 1
        self._bootstrap: HttpServer | None = None

    @property
    def held(self) -> dict[str, object]:
        return {str(room): one for room, one in self.rooms.items()} | dict.fromkeys(
            map(str, self.waiting)
        )

    def routes(self) -> Routed:
        return [*super().routes(), ("GET", "/server_info", self._server_info)]

    async def start(self) -> None:
        await super().start()
        if self.role == "prefill":
            self._bootstrap = HttpServer(Routes([("GET", "/route", self._route)]).handle)
            self.bootstrap_port = await self._bootstrap.listen(self.host, self.bootstrap_port)
            self.network.engines[f"bootstrap {self.bootstrap_port}"] = self

    async def stop(self) -> None:
        await super().stop()
        if self._bootstrap is not None:
            await self._bootstrap.close()
            self._bootstrap = None

    async def _server_info(self, exchange: Exchange) -> None:
        mode = "null" if self.role == "both" else self.role
        info = {"disaggregation_mode": mode, "version": "0.5.23", "dp_size": self.ranks}
        info |= {"max_total_num_tokens": 200_000, "page_size": self.page_size}
        if self.page_size > 1:
            info["kv_events_config"] = '{"publisher":"zmq","endpoint":"tcp://*:5557"}'
        if self.role == "prefill":
            info["disaggregation_bootstrap_port"] = self.bootstrap_port
        exchange.respond(200, json.dumps(info).encode())

    async def _route(self, exchange: Exchange) -> None:
        info = {"attn_tp_size": 1, "dp_size": self.ranks, "follow_bootstrap_room": True}
        exchange.respond(200, json.dumps(info).encode())

    def rank(self, exchange: Exchange, body: Json) -> int:
        given = exchange.headers.get("x-data-parallel-rank", body.get("routed_dp_rank"))
        if given is None:
            return self.spread(body)
        if not str(given).lstrip("-").isdecimal():
            raise bad_request(f"Invalid X-Data-Parallel-Rank header: {given}")
        if not 0 <= int(given) < self.ranks:
            raise bad_request(f"routed_dp_rank={given} out of range [0, {self.ranks})")
        return int(given)

    def spread(self, body: Json) -> int:
        if self.role == "prefill":
            return int(body["bootstrap_room"]) % self.ranks
        return super().spread(body)

    def refuse(self, body: Json) -> None:
        if self.role != "both" and body.get("bootstrap_room") is None:
            raise bad_request("Disaggregated request received without bootstrap room id.")
        if body.get("messages") and body.get("stream") and body.get("return_token_ids"):
            raise bad_request("return_token_ids is not supported with streaming on chats.")
        if self.role == "both" and body.get("bootstrap_room") is not None:
            self.violations.append("a room for an engine that is not disaggregated")

    def choices(self, request: GenerateRequest) -> list[GenerateRequest]:
        return [replace(one, seed=request.seed) for one in request.choices()]

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        if self.role == "prefill":
            return await self._send(body, request)
        if self.role == "decode":
            return await self._receive(body)
        return self.compute(request)

    async def _send(self, body: Json, request: GenerateRequest) -> bytes:
        number = body["bootstrap_room"]
        if not isinstance(number, int) or not 0 < number < 2**63:
            self.violations.append(f"room {number!r}")
        if number in self.rooms:
            self.violations.append(f"room {number} is open already")
            raise LoadFailed("Duplicate or cancelled bootstrap room")
        room = self.rooms[number] = _Room(body, self.rank_of(body))
        hinted = body.get("disagg_prefill_dp_rank") is not None
        if self.ranks > 1 and not hinted and room.rank != number % self.ranks:
            self.violations.append(f"room {number} on rank {room.rank}: conflict")
        try:
            room.kv = self.compute(request)
            await room.peer.wait()
            room.sent.set()
            return room.kv
        finally:
            del self.rooms[number]

    async def _receive(self, body: Json) -> bytes:
        number = body["bootstrap_room"]
        if number in self.waiting:
            self.violations.append(f"room {number} is open already")
        self.waiting.add(number)
        try:
            remote = await self._peer(body)
            await until(lambda: number in remote.rooms, patience_s=None)
            room = remote.rooms[number]
            hint = body.get("disagg_prefill_dp_rank")
            if room.rank != (number % remote.ranks if hint is None else hint):
                self.violations.append(f"room {number} is on rank {room.rank}, not on {hint}")
            if _sampling(room.body) != _sampling(body):
                self.violations.append("the legs differ in what they say of sampling")
            room.peer.set()
            await room.sent.wait()
        finally:
            self.waiting.discard(number)
        self.fetched += 1
        return room.kv

    async def _peer(self, body: Json) -> "SglangEngine":
        host, port = body["bootstrap_host"], body["bootstrap_port"]
        host = host.removeprefix("[").removesuffix("]")
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}/route?prefill_dp_rank=-1"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                await answer.read()
        except aiohttp.ClientError as error:
            raise LoadFailed(f"Could not fetch prefill parallel info: {error}") from None
        remote = self.network.engines[f"bootstrap {port}"]
        assert isinstance(remote, SglangEngine)
        return remote

    def fail(self, exchange: Exchange, request: GenerateRequest, message: str) -> None:
        error = {"object": "error", "message": message, "type": "INTERNAL_SERVER_ERROR"}
        content = json.dumps({"error": {**error, "param": None, "code": 500}}).encode()
        if not request.stream:
            exchange.respond(500, content)
            return
        exchange.start(200, SSE_HEADERS)
        exchange.write(b"data: " + content + b"\n\n")
        exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    def whole(self, request: GenerateRequest, answers: list[SimAnswer]) -> bytes:
        if self.role != "prefill":
            return super().whole(request, answers)
        content = json.loads(super().whole(request, answers))
        content["usage"]["completion_tokens"] = 1
        content["usage"]["prompt_tokens_details"] = None
        return json.dumps(content).encode()


def _sampling(body: Json) -> Json:
    return {key: value for key, value in body.items() if key not in _OF_LEG}
