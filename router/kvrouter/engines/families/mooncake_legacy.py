"""vLLM up to 0.13 with MooncakeConnector: one leg after the other, matched by their request's id.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake_connector.py of vLLM 0.13, and
mooncake_connector_v1.py of Mooncake's own wheel for vLLM 0.10 to 0.12. The prefill leg's answer
names its engine's side channel. There the decode engine asks for the KV of the request with its own
id (`send_kv_to_decode`). The prefill engine does not refuse an unknown id: it sends nothing to the
whole batch, and reports success. So both legs of one hand-over have an id that no other leg ever
has, and a hand-over goes to one decode engine, once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.engines.families.nixl import Nixl
from kvrouter.engines.families.pages import ProbeFailed

if TYPE_CHECKING:
    from kvrouter.engines.families.pages import EnginePages

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_FIRST: Final = (0, 8)  # no vLLM before has a connector of this kind
_IDS_DIFFER_FROM: Final = (0, 14)  # v1/engine/input_processor.py adds random letters to ids
_TRANSFERS_FROM: Final = (0, 16)  # MooncakeConnector with transfer_id and bootstrap servers


class MooncakeLegacy(Nixl):
    """Engines of vLLM with MooncakeConnector before it had bootstrap servers."""

    name: ClassVar[str] = "mooncake-legacy"
    lease_s: ClassVar[float] = 120.0
    """480 s in vLLM, 120 s in Mooncake's wheel (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""
    unique_request_ids: ClassVar[bool] = True

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """None: these versions forget the parameters of a request that they refuse."""
        return None

    async def variant(self, pages: EnginePages) -> str:
        """By the version of vLLM."""
        return await mooncake_variant(pages, self.name)


async def mooncake_variant(pages: EnginePages, configured: str) -> str:
    """The family of an engine's version of MooncakeConnector; `configured` if it is unknown.

    Raises:
        ProbeFailed: the version hands over nothing and reports success.
    """
    version = (await pages.json("/version")).get("version")
    found = _VERSION.match(str(version))
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if number < _FIRST:  # also 0.1.dev1, the version of builds without tags
        return configured
    if _IDS_DIFFER_FROM <= number < _TRANSFERS_FROM:
        raise ProbeFailed(
            f"vLLM {version} gives the legs of one request different ids, by which its "
            "MooncakeConnector matches them: no KV would be loaded, and answers would be wrong "
            "without an error; use vLLM 0.13, or 0.16 and later"
        )
    return "mooncake" if number >= _TRANSFERS_FROM else MooncakeLegacy.name
