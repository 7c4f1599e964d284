"""vLLM with MooncakeConnector, by the rules of vLLM 0.32's own source.

Under vllm/distributed/kv_transfer/kv_connector/v1/mooncake/:
- mooncake_connector.py `update_state_after_alloc`: a decode leg needs remote_engine_id,
  remote_bootstrap_addr and transfer_id, else it is computed with a warning; a producer asserts that
  it is never asked to fetch, a consumer that it is never asked to send; a prefill leg without
  transfer_id sends nothing.
- `send_kv_to_decode`: who asks before the prefill leg is there waits for it, until
  VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s); if that leg is aborted (`reqs_not_processed`), too.
- `request_finished`: only a request that ended by length is sent; it answers no parameters; its
  blocks stay until they were sent, or for 480 s.
- `request_finished` with do_remote_prefill: a decode leg that ends before it was scheduled asks for
  nothing, which frees the prefill engine's blocks.
- `_connect_to_prefiller_bootstrap`: GET remote_bootstrap_addr/query, which must name the engine id.
- mooncake_utils.py `MooncakeBootstrapServer.query`: {"0": {"engine_id": .., "worker_addr": ..}}.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import ClassVar

import aiohttp
from tests.fakes.pd import Json, LoadFailed, Network, PdEngine

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer
from kvrouter.http.server.routes import Routes
from kvrouter.tools.sim.requests import GenerateRequest

_WHERE = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


@dataclass
class _Sending:
    kv: bytes = b""
    gone: bool = False  # who asked for it was aborted: it is sent all the same, to nobody's use
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class MooncakeEngine(PdEngine):
    """One engine: of "prefill" a producer, of "decode" a consumer.

    Attributes:
        sends: transfers under way, by their id, made by whichever side comes first.
        prefilled_on: the data-parallel rank of each transfer.
        registered: ranks that its bootstrap server names, None for all.
        fetched: prompts whose KV this engine had from others.
        bootstrap_port: of its bootstrap server.
    """

    family: ClassVar[str] = "mooncake"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        super().__init__(network, role, name)
        self.sends: dict[str, _Sending] = {}
        self.registered: int | None = None
        self.fetched = 0
        self.bootstrap_port = 0
        self.prefilled_on: dict[str, int] = {}
        self._bootstrap: HttpServer | None = None

    @property
    def held(self) -> dict[str, object]:
        return {name: one for name, one in self.sends.items() if one.ready.is_set()}

    async def start(self) -> None:
        await super().start()
        if self.role == "prefill":
            self._bootstrap = HttpServer(Routes([("GET", "/query", self._query)]).handle)
            self.bootstrap_port = await self._bootstrap.listen("127.0.0.1", self.bootstrap_port)

    async def stop(self) -> None:
        await super().stop()
        self.sends.clear()
        if self._bootstrap is not None:
            await self._bootstrap.close()
            self._bootstrap = None

    async def _query(self, exchange: Exchange) -> None:
        entries = {
            str(rank): {"engine_id": self.engine_id(rank), "worker_addr": {"0": {"0": "tcp://x"}}}
            for rank in range(self.ranks if self.registered is None else self.registered)
        }
        exchange.respond(200, json.dumps(entries).encode())

    def engine_id(self, rank: int) -> str:
        return f"{self.name}_dp{rank}"

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return await self._to_send(body, request)
        if not params.get("do_remote_prefill"):
            return self.compute(request)
        if self.role == "prefill":
            self.violations.append("a producer was asked to fetch: assert not is_kv_producer")
        if not all(params.get(name) for name in _WHERE):
            self.violations.append(f"invalid parameters: {params}")
            return self.compute(request)
        return await self._fetch(params)

    async def _to_send(self, body: Json, request: GenerateRequest) -> bytes:
        transfer_id = body["kv_transfer_params"].get("transfer_id")
        if self.role == "decode":
            self.violations.append("a consumer was asked to send: assert not is_kv_consumer")
        if not transfer_id:
            self.violations.append("missing transfer_id from router")
            return self.compute(request)
        if transfer_id in self.prefilled_on:
            self.violations.append(f"{transfer_id} was used twice")
        self.prefilled_on[transfer_id] = self.rank_of(body)
        return self.compute(request)

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        params = body.get("kv_transfer_params") or {}
        transfer_id = params.get("transfer_id")
        if params.get("do_remote_decode") and transfer_id:
            sending = self.sends.setdefault(transfer_id, _Sending())
            sending.kv = kv
            sending.ready.set()
            if sending.gone:
                del self.sends[transfer_id]
        return None

    async def _fetch(self, params: Json) -> bytes:
        await self._ask_bootstrap(params)
        name, _, rank = str(params["remote_engine_id"]).rpartition("_dp")
        remote = self.network.engines[name]
        assert isinstance(remote, MooncakeEngine)
        transfer_id = params["transfer_id"]
        sending = remote.sends.setdefault(transfer_id, _Sending())
        try:
            await sending.ready.wait()
        except asyncio.CancelledError:
            sending.gone = True
            raise
        remote.sends.pop(transfer_id, None)
        if remote.prefilled_on.get(transfer_id) != int(rank):
            self.violations.append(f"{transfer_id} was prefilled on another rank than {rank}")
        self.fetched += 1
        return sending.kv

    async def _ask_bootstrap(self, params: Json) -> None:
        url = f"{params['remote_bootstrap_addr']}/query"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                known = {entry["engine_id"] for entry in (await answer.json()).values()}
        except aiohttp.ClientError as error:
            raise LoadFailed(f"bootstrap server: {error}") from None
        if params["remote_engine_id"] not in known:
            raise LoadFailed(f"remote engine_id {params['remote_engine_id']} not found")

    async def refused(self, body: Json) -> None:
        self._give_up(body)

    async def stall(self, body: Json) -> None:
        try:
            await super().stall(body)
        finally:
            self._give_up(body)

    def _give_up(self, body: Json) -> None:
        """Ended before it was scheduled: a decode leg asks for nothing, which frees."""
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return
        with contextlib.suppress(KeyError):
            name = str(params["remote_engine_id"]).rpartition("_dp")[0]
            remote = self.network.engines[name]
            assert isinstance(remote, MooncakeEngine)
            remote.abandoned(params["transfer_id"])

    def abandoned(self, transfer_id: str) -> None:
        """Nobody will fetch it: it is freed, at the latest when it is ready."""
        sending = self.sends.setdefault(transfer_id, _Sending())
        sending.gone = True
        if sending.ready.is_set():
            del self.sends[transfer_id]
