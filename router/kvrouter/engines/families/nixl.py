"""vLLM with NixlConnector: the answer of the prefill leg says where decode fetches its KV.

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl of vLLM 0.33. The prefill engine keeps the
blocks until they were fetched or their lease (30 s) ends. After that they may hold anything, and a
fetch still succeeds. So the router gives a hand-off to one decode engine, once.

With NixlPushConnector the decode engine says where they go, and the prefill engine writes them
there. It matches the two by the ids of the requests, but for the random letters that engines append
(push_worker.py, `_pop_matching_registration`): two hand-overs of one id would be mixed up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from kvrouter.engines.families.base import Handoff, LegOrder
from kvrouter.engines.families.vllm import TRANSFER, Vllm

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class Nixl(Vllm):
    """Engines of vLLM with NixlConnector."""

    name: ClassVar[str] = "nixl"
    summary: ClassVar[str] = "vLLM's NixlConnector or NixlPushConnector"
    order: ClassVar[LegOrder] = LegOrder.HANDED
    detected_by: ClassVar[tuple[str, str] | None] = None
    prefill_members: ClassVar[Mapping[str, bytes]] = {TRANSFER: PREFILL}
    lease_s: ClassVar[float] = 30.0
    unique_request_ids: ClassVar[bool] = True

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """None with NixlPushConnector: an engine that refuses a request tells the other nothing.

        push_worker.py, `start_load_kv`: the other one would be told of blocks to write alone.
        """
        if orjson.loads(params).get("transfer_mode") == "push":
            return None
        return super().release_body(model, params)

    def _handoff(self, answer: dict[str, Any]) -> Handoff:
        handoff = super()._handoff(answer)
        params = answer.get(TRANSFER) or {}
        if params.get("do_remote_prefill"):
            handoff.transfer_params = orjson.dumps(params)
        elif handoff.manifest is None:
            handoff.missing = True
        return handoff
