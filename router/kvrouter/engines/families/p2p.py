"""vLLM's OffloadingConnector with a p2p tier: host memory to host memory, also without RDMA.

Source: vllm/v1/kv_offload/tiering/p2p/manager.py of vLLM 0.33, and "Orchestration-Layer Protocol"
in its docs/features/kv_offloading_usage.md. Both legs name one transfer; the decode leg also names
the control socket of the prefill engine's tier, by the very `host` with which that was started.
What is not loaded within 30 s the decode engine computes. What nobody fetches stays for a minute.
"""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from kvrouter.engines.engine import Bootstrap, Role
from kvrouter.engines.families.base import LegOrder, Rendezvous
from kvrouter.engines.families.pages import EnginePages, LegSupport
from kvrouter.engines.families.vllm import TRANSFER, Vllm

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine

CONTROL_PORT: Final = 5710
"""VLLM_P2P_SIDE_CHANNEL_PORT's default; each data-parallel rank adds its number."""


class P2p(Vllm):
    """Engines of vLLM whose host memory is each other's tier."""

    name: ClassVar[str] = "p2p"
    summary: ClassVar[str] = "vLLM's OffloadingConnector with a p2p tier"
    order: ClassVar[LegOrder] = LegOrder.CONCURRENT
    detected_by: ClassVar[tuple[str, str] | None] = None
    lease_s: ClassVar[float] = 60.0

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A transfer of its own, at the tier of the data-parallel rank that `prefill` is."""
        bootstrap = prefill.identity.bootstrap if prefill.identity else None
        if bootstrap is None:
            raise LookupError(f"the control socket of {prefill.address} is unknown")
        host, port = bootstrap.bracketed, bootstrap.port + prefill.event_rank
        transfer = {"kv_request_id": token_hex(16)}
        sends = {"remote_decoder": transfer}
        takes = {"remote_prefiller": transfer | {"remote_host": host, "remote_port": port}}
        return Rendezvous({TRANSFER: orjson.dumps(sends)}, {TRANSFER: orjson.dumps(takes)})

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """None: a request that an engine refuses never reaches its tier."""
        return None

    async def legs(self, pages: EnginePages) -> LegSupport:
        """Each rank of a prefill engine has a control socket, which speaks no HTTP to be asked."""
        engine, port = pages.engine, pages.bootstrap_port or CONTROL_PORT
        if not engine.role.serves(Role.PREFILL):
            return LegSupport()
        ranks = tuple(map(str, await self.event_ranks(pages)))
        return LegSupport(bootstrap=Bootstrap(engine.host, port, ranks))
