"""vLLM with NixlConnector (pull), by the rules of vLLM 0.32's own source.

Under vllm/distributed/kv_transfer/kv_connector/v1/nixl/:
- pull_scheduler.py `request_finished`: parameters are answered, and the blocks kept, only for a
  request with do_remote_decode that ended by length or stop; an aborted one leaves nothing.
- base_scheduler.py `kv_lease_duration` 30 s, base_worker.py `_reap_expired_send_leases`: after that
  the blocks are free whoever wants them.
- pull_worker.py `_get_new_notifs`: the first notification frees; one for an unknown request means
  that a decode worker has read memory which may hold anything ("Potentially invalid KV blocks").
- base_scheduler.py: each data-parallel rank has a side channel of its own (base port + index).
- pull_scheduler.py `update_state_after_alloc`: all four remote_* must be there, else the request is
  computed with a warning; a request fetches once.
- base_worker.py: an unknown engine id fails the load (config/kv_transfer.py: policy "fail").
- entrypoints/generate/base/serving.py `_with_kv_transfer_rejection_cleanup`: a request that is
  refused in the server, or cut off there, has the blocks freed; so has one that is aborted before
  it was scheduled (`request_finished` with do_remote_prefill). One whose connection closes before
  the server reads its body (uvicorn drops it) has not: nobody has seen the parameters.
"""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from tests.fakes.pd import GARBAGE, Json, LoadFailed, Network, PdEngine

from kvrouter.tools.sim.requests import GenerateRequest

LEASE_S = 30.0
_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass
class _Pinned:
    kv: bytes
    tokens: int
    expiry: asyncio.TimerHandle


class NixlEngine(PdEngine):
    """One engine, of whatever kv_role: NixlConnector goes by what each request asks.

    Attributes:
        pinned: blocks kept for decode engines, by request id.
        fetched: hand-offs whose KV this engine had from others.
        freed: hand-offs of this engine that were given up without being fetched.
        poisoned: names of engines with which its NIXL agent has stale state: they fetch nothing.
    """

    family: ClassVar[str] = "nixl"

    def __init__(self, network: Network, role: str, name: str = "") -> None:
        super().__init__(network, role, name)
        self.pinned: dict[str, _Pinned] = {}
        self.lease_s = LEASE_S
        self.tells = True  # False: as a request that ended otherwise than by length or stop
        self.fetched = 0
        self.freed = 0
        self.poisoned: set[str] = set()
        self._number = 0

    @property
    def held(self) -> dict[str, object]:
        return dict(self.pinned)

    def metrics(self) -> bytes:
        return super().metrics() + b'vllm:nixl_xfer_time_seconds_count{engine="0"} 0.0\n'

    async def stop(self) -> None:
        await super().stop()
        for kept in self.pinned.values():
            kept.expiry.cancel()
        self.pinned.clear()

    def notified(self, request_id: str, *, read: bool) -> bytes:
        """A decode engine has read the blocks, or will not; returns what it read."""
        kept = self.pinned.pop(request_id, None)
        if kept is None:
            if read:
                self.violations.append(f"{request_id} was read after its blocks had been freed")
            return GARBAGE
        kept.expiry.cancel()
        self.freed += not read
        return kept.kv

    async def kv(self, body: Json, request: GenerateRequest) -> bytes:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            return self.compute(request)
        if (body.get("n") or 1) > 1:
            self.violations.append("several samples fetch the blocks of one hand-off")
        if not all(params.get(name) is not None for name in _REMOTE):
            self.violations.append(f"invalid parameters: {params}")
            return self.compute(request)
        remote = self._remote(params)
        if remote is None:
            raise LoadFailed("remote engine is unknown")
        if self.name in remote.poisoned:
            remote.notified(params["remote_request_id"], read=False)
            raise LoadFailed("Internal server error")
        kept = remote.pinned.get(params["remote_request_id"])
        if kept is not None and kept.tokens != len(request.prompt):
            self.violations.append("the hand-off is of a prompt of another length")
        self.fetched += 1
        return remote.notified(params["remote_request_id"], read=True)

    def finish(self, body: Json, request: GenerateRequest, kv: bytes) -> Json | None:
        params = body.get("kv_transfer_params") or {}
        if not params.get("do_remote_decode") or not self.tells:
            return None
        self._number += 1
        request_id = f"cmpl-{self.name}-{self._number}"
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self.lease_s, self.pinned.pop, request_id, None)
        self.pinned[request_id] = _Pinned(kv, len(request.prompt), expiry)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": f"{self.name}_dp{self.rank_of(body)}",
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600 + self.rank_of(body),
            "tp_size": 1,
            "remote_num_tokens": len(request.prompt),
            "transfer_mode": "pull",
        }

    async def refused(self, body: Json) -> None:
        self._give_up(body)

    async def stall(self, body: Json) -> None:
        try:
            await super().stall(body)
        finally:
            self._give_up(body)  # aborted before it was scheduled

    def _give_up(self, body: Json) -> None:
        params = body.get("kv_transfer_params") or {}
        remote = self._remote(params) if params.get("do_remote_prefill") else None
        if remote is not None:
            remote.notified(params["remote_request_id"], read=False)

    def _remote(self, params: Json) -> "NixlEngine | None":
        name, _, rank = str(params.get("remote_engine_id")).rpartition("_dp")
        if params.get("remote_port") != 5600 + int(rank or 0):
            self.violations.append(f"the side channel of rank {rank} is not there: {params}")
        found = self.network.engines.get(name)
        return found if isinstance(found, NixlEngine) else None
