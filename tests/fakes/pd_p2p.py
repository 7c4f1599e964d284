"""vLLM's OffloadingConnector with a p2p tier, by the rules of vLLM 0.33's own source.

Under vllm/v1/kv_offload/tiering/p2p/:
- manager.py `_parse_source`, `_parse_dest`: a decode leg needs kv_request_id, remote_host and
  remote_port, else it computes; a prefill leg without kv_request_id stores nothing.
- `lookup`: a decode leg takes it for granted that the prefill engine has all blocks.
- `_get_or_create_session`: `host:port` is dialled as it is given, and is the peer's name: a tier
  that was started with another `host` answers to nobody. Each data-parallel rank has a port.
- session/client.py: what was not loaded after 30 s (`_LOAD_TIMEOUT_S`) is computed.
- session/server.py `on_fetch`: a second fetch of one id is a protocol error, and ends the session.
- manager.py `_reap_unbound_stores`: blocks that nobody fetches stay for 60 s, whoever was refused.
- docs/features/kv_offloading_usage.md: no request has both roles of prefill and decode.
"""

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from tests.fakes.pd import Json, LoadFailed, Network, PdEngine

from kvrouter.tools.sim.requests import GenerateRequest

HOST = "127.0.0.1"
FIRST_PORT = 5710
PORTS = 64
LOAD_TIMEOUT_S = 30.0


@dataclass
class _Parked:
    kv: bytes = b""
    rank: int = 0
    stored: asyncio.Event = field(default_factory=asyncio.Event)


class P2pEngine(PdEngine):
    """One engine; which leg it does, each request says.

    Attributes:
        control_port: of its first rank.
        parked: what decode engines have fetched or will, by the id of its transfer.
        unbound_timeout_s: for how long blocks stay that nobody fetches.
        asked_for: ids that were fetched here; `fetched`: prompts whose KV came from others.
    """

    family: ClassVar[str] = "p2p"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        super().__init__(network, role, name)
        self.control_port = FIRST_PORT + PORTS * len(network.engines)
        self.parked: dict[str, _Parked] = {}
        self.unbound_timeout_s = 1.0
        self.asked_for: set[str] = set()
        self.fetched = 0

    @property
    def held(self) -> dict[str, object]:
        return {name: one for name, one in self.parked.items() if one.stored.is_set()}

    async def stop(self) -> None:
        await super().stop()
        self.parked.clear()

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        params = body.get("kv_transfer_params") or {}
        takes, sends = params.get("remote_prefiller"), params.get("remote_decoder")
        if takes is not None and sends is not None:
            self.violations.append(f"contradictory roles: {params}")
        if takes is None:
            return self.compute(request)
        if not all(takes.get(name) for name in ("kv_request_id", "remote_host", "remote_port")):
            self.violations.append(f"invalid parameters: {params}")
            return self.compute(request)
        return await self._fetch(takes)

    async def _fetch(self, takes: Json) -> bytes:
        remote, rank = self._remote(takes)
        transfer_id = takes["kv_request_id"]
        if transfer_id in remote.asked_for:
            self.violations.append(f"duplicate fetch for kv_request_id={transfer_id}")
        remote.asked_for.add(transfer_id)
        parked = remote.parked.setdefault(transfer_id, _Parked())
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await parked.stored.wait()
        except TimeoutError:
            raise LoadFailed("the load timed out") from None
        remote.parked.pop(transfer_id, None)
        if parked.rank != rank:
            self.violations.append(f"{transfer_id} was stored on rank {parked.rank}, not {rank}")
        self.fetched += 1
        return parked.kv

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        sends = (body.get("kv_transfer_params") or {}).get("remote_decoder")
        if sends is None:
            return None
        if not sends.get("kv_request_id"):
            self.violations.append("submit_store missing kv_request_id")
            return None
        transfer_id = sends["kv_request_id"]
        parked = self.parked.setdefault(transfer_id, _Parked())
        if parked.stored.is_set():
            self.violations.append(f"{transfer_id} was used twice")
        parked.kv, parked.rank = kv, self.rank_of(body)
        parked.stored.set()
        loop = asyncio.get_running_loop()
        loop.call_later(self.unbound_timeout_s, self.parked.pop, transfer_id, None)
        return None

    def _remote(self, takes: Json) -> tuple["P2pEngine", int]:
        for engine in self.network.engines.values():
            assert isinstance(engine, P2pEngine)
            rank = takes["remote_port"] - engine.control_port
            if 0 <= rank < PORTS:
                if takes["remote_host"] != HOST:
                    self.violations.append(f"nobody answers to {takes['remote_host']}")
                return engine, rank - engine.first_rank
        raise AssertionError(f"no control socket at {takes}")
