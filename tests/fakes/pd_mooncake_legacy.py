"""vLLM 0.13 with MooncakeConnector, by the rules of its own source.

Under vllm/ of vLLM 0.13:
- distributed/kv_transfer/kv_connector/v1/mooncake_connector.py `update_state_after_alloc`: a decode
  leg needs remote_host and remote_port, else it is computed with a warning; a producer asserts that
  it is never asked to fetch; a prefill leg is noted under its request id, whatever stood there.
- `request_finished`: parameters are answered, and blocks kept, only for a request with
  do_remote_decode that ended by length, and a consumer asserts that it never has such a one. A
  decode leg that ends before it was scheduled asks for nothing, which frees the blocks.
- `send_kv_to_decode`: a request id that is not noted is warned of, nothing is sent to the whole
  batch, and the decode engine is told TRANS_DONE: it decodes from what its memory held.
- `get_finished`: what nobody asked for is free after VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
- `receive_kv`: where the prefill engine is not there, the request waits until it is aborted.
- `get_mooncake_side_channel_port`: each data-parallel rank has a side channel of its own.
- entrypoints/openai/serving_completion.py, serving_chat.py, serving_engine.py `_base_request_id`:
  ids are cmpl-X-0 and chatcmpl-X of the header X-Request-Id.
- v1/engine/output_processor.py `add_request`: an id that is running already is refused.
- A refused request frees nothing (`_with_kv_transfer_rejection_cleanup` came later).
From 0.14 on v1/engine/input_processor.py adds random letters to each id, so that the legs' differ.
"""

import asyncio
from dataclasses import dataclass
from secrets import token_hex
from typing import ClassVar

from tests.fakes.pd import GARBAGE, Json, Network, PdEngine

from kvrouter.errors import bad_request
from kvrouter.tools.sim.requests import GenerateRequest

SIDE_CHANNEL = 8998
PORTS = 64


@dataclass
class _Kept:
    kv: bytes
    tokens: int
    expiry: asyncio.TimerHandle


class MooncakeLegacyEngine(PdEngine):
    """One engine: of "prefill" a producer, of "decode" a consumer.

    Attributes:
        kept: blocks kept for decode engines, by request id.
        abort_timeout_s: for how long.
        noted: ids of all prefill legs that were ever done here.
        running: which body has each id that is under way.
        fetched: prompts whose KV this engine had from others.
    """

    family: ClassVar[str] = "mooncake-legacy"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        super().__init__(network, role, name)
        self.version = "0.13.0"
        self.kept: dict[str, _Kept] = {}
        self.noted: set[str] = set()
        self.running: dict[str, int] = {}
        self.abort_timeout_s = 1.0
        self.fetched = 0
        self.gone = False
        self._channel = SIDE_CHANNEL + PORTS * len(network.engines)
        network.engines[f"side channel {self._channel}"] = self

    @property
    def held(self) -> dict[str, object]:
        return dict(self.kept)

    async def start(self) -> None:
        await super().start()
        self.gone = False

    async def stop(self) -> None:
        await super().stop()
        self.gone = True
        for kept in self.kept.values():
            kept.expiry.cancel()
        self.kept.clear()

    def engine_id(self, body: Json) -> str:
        """The id that the request has in this engine."""
        given = self.id_of(body) or token_hex(8)
        if self.version != "0.13.0":
            given += f"-{token_hex(4)}"
        return f"chatcmpl-{given}" if "messages" in body else f"cmpl-{given}-0"

    def refuse(self, body: Json) -> None:
        name = self.id_of(body)
        if name and name in self.running:
            raise bad_request(f"Request id {name} already running.")
        self.running[name] = id(body)

    def ended(self, body: Json) -> None:
        if self.running.get(self.id_of(body)) == id(body):
            del self.running[self.id_of(body)]

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            if self.role == "decode":
                self.violations.append("a consumer was asked to send: assert not is_kv_consumer")
            return self.compute(request)
        if not params.get("do_remote_prefill"):
            return self.compute(request)
        if self.role == "prefill":
            self.violations.append("a producer was asked to fetch: assert not is_kv_producer")
        if (body.get("n") or 1) > 1:
            self.violations.append("several samples fetch the blocks of one hand-over")
        if params.get("remote_host") is None or params.get("remote_port") is None:
            self.violations.append(f"invalid parameters: {params}")
            return self.compute(request)
        return await self._fetch(body, request)

    async def _fetch(self, body: Json, request: GenerateRequest) -> bytes:
        remote = self._remote(body)
        if remote.gone:
            await asyncio.Event().wait()
        kept = remote.kept.pop(self.engine_id(body), None)
        if kept is None:
            self.violations.append(f"{self.engine_id(body)} not found in reqs_need_send")
            return GARBAGE
        kept.expiry.cancel()
        if kept.tokens < len(request.prompt):
            self.violations.append("assert num_local_blocks >= num_remote_blocks")
        self.fetched += 1
        return kept.kv

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_decode"):
            return None
        name = self.engine_id(body)
        if name in self.noted:
            self.violations.append(f"{name} names two hand-overs: one gets the other's KV")
        self.noted.add(name)
        expiry = asyncio.get_running_loop().call_later(
            self.abort_timeout_s, self.kept.pop, name, None
        )
        self.kept[name] = _Kept(kv, len(request.prompt), expiry)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "127.0.0.1",
            "remote_port": self._channel + self.rank_of(body),
        }

    async def stall(self, body: Json) -> None:
        try:
            await super().stall(body)
        finally:
            self._give_up(body)

    def _give_up(self, body: Json) -> None:
        """Aborted before it was scheduled: it asks for nothing, which frees."""
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") and params.get("remote_port"):
            kept = self._remote(body).kept.pop(self.engine_id(body), None)
            if kept is not None:
                kept.expiry.cancel()

    def _remote(self, body: Json) -> "MooncakeLegacyEngine":
        port = body["kv_transfer_params"]["remote_port"]
        channel = SIDE_CHANNEL + (port - SIDE_CHANNEL) // PORTS * PORTS
        remote = self.network.engines[f"side channel {channel}"]
        assert isinstance(remote, MooncakeLegacyEngine)
        return remote
