"""vLLM up to 0.13 with MooncakeConnector: one leg after the other, matched by their request's id.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake_connector.py of vLLM 0.13, and
mooncake_connector_v1.py of Mooncake's own wheel for vLLM 0.10 to 0.12. The prefill leg's answer
names its engine's side channel; there the decode engine asks for the KV of the request that has its
own id (`send_kv_to_decode`). An id that is not known there is not refused: the prefill engine sends
nothing, to nobody of that batch, and says that it is done. So both legs of one hand-over have an id
that no other leg ever has, and a hand-over goes to one decode engine once.
"""

from __future__ import annotations

from typing import ClassVar

from kvrouter.engines.families.nixl import Nixl


class MooncakeLegacy(Nixl):
    """Engines of vLLM with MooncakeConnector as it was before it had bootstrap servers."""

    name: ClassVar[str] = "mooncake-legacy"
    lease_s: ClassVar[float] = 120.0
    """480 s in vLLM, 120 s in Mooncake's wheel (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""
    unique_request_ids: ClassVar[bool] = True

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """None: these versions forget the parameters of a request that they refuse."""
        return None
