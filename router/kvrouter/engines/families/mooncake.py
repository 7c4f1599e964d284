"""vLLM with MooncakeConnector: both legs at once, the decode engine asks for its KV beforehand.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py of vLLM 0.32
(`update_state_after_alloc`, `request_finished`). Both legs name one transfer; the decode leg names
the prefill engine's bootstrap server and which of its data-parallel ranks has the KV.

Up to vLLM 0.13 one leg goes after the other, and the request's id matches them. Source: the same of
vLLM 0.13 (mooncake_connector.py), and mooncake_connector_v1.py of Mooncake's own wheel for vLLM
0.10 to 0.12. The prefill leg's answer names its engine's side channel. There the decode engine asks
for the KV of the request with its own id (`send_kv_to_decode`). The prefill engine does not refuse
an unknown id: it sends nothing to the whole batch, and reports success. So both legs of one
hand-over have an id that no other leg ever has, and it goes to one decode engine, once.
"""

from __future__ import annotations

import re
from itertools import count
from secrets import token_hex
from typing import ClassVar, Final

import msgspec
import orjson

from kvrouter.engines.engine import Bootstrap, Engine, Role
from kvrouter.engines.families.base import LegOrder, Rendezvous
from kvrouter.engines.families.nixl import Nixl
from kvrouter.engines.families.pages import EnginePages, LegSupport, ProbeFailed
from kvrouter.engines.families.vllm import TRANSFER, Vllm
from kvrouter.http.bounded_json import bounded

BOOTSTRAP_PORT: Final = 8998  # VLLM_MOONCAKE_BOOTSTRAP_PORT's default

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_FIRST: Final = (0, 8)  # no vLLM before has a connector of this kind
_IDS_DIFFER_FROM: Final = (0, 14)  # v1/engine/input_processor.py adds random letters to ids
_TRANSFERS_FROM: Final = (0, 16)  # MooncakeConnector with transfer_id and bootstrap servers


class _Rank(msgspec.Struct):
    engine_id: str


class Mooncake(Vllm):
    """Engines of vLLM with MooncakeConnector."""

    name: ClassVar[str] = "mooncake"
    summary: ClassVar[str] = "vLLM's MooncakeConnector"
    order: ClassVar[LegOrder] = LegOrder.CONCURRENT
    detected_by: ClassVar[tuple[str, str] | None] = None
    lease_s: ClassVar[float] = 480.0

    def __init__(self) -> None:
        self._prefix = token_hex(8)
        self._numbers = count()

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A transfer of its own, at the data-parallel rank that `prefill` is."""
        bootstrap = prefill.identity.bootstrap if prefill.identity else None
        rank = prefill.rank or 0
        if bootstrap is None or rank >= len(bootstrap.engine_ids):
            raise LookupError(f"the bootstrap server of {prefill.address} is unknown")
        transfer_id = f"xfer-{self._prefix}-{next(self._numbers):x}"
        sends = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        takes = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{bootstrap.bracketed}:{bootstrap.port}",
            "remote_engine_id": bootstrap.engine_ids[rank],
            "transfer_id": transfer_id,
        }
        return Rendezvous({TRANSFER: orjson.dumps(sends)}, {TRANSFER: orjson.dumps(takes)})

    async def variant(self, pages: EnginePages) -> str:
        """By the version of vLLM."""
        return await _variant(pages, self.name)

    async def legs(self, pages: EnginePages) -> LegSupport:
        """A prefill engine's bootstrap server must know all of its data-parallel ranks."""
        engine = pages.engine
        if not engine.role.serves(Role.PREFILL):
            return LegSupport()
        found = Bootstrap(engine.host, pages.bootstrap_port or BOOTSTRAP_PORT)
        url = f"http://{found.bracketed}:{found.port}/query"
        try:
            ranks = msgspec.json.decode(bounded(await pages.body(url)), type=dict[int, _Rank])
        except ProbeFailed as error:
            raise ProbeFailed(f"MooncakeConnector's bootstrap server: {error}") from None
        except (ValueError, RecursionError) as error:  # msgspec raises more than its own
            raise ProbeFailed(f"{url} is not MooncakeConnector's ({error})") from None
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ProbeFailed(f"{url}: not all of its data-parallel ranks are there yet")
        engine_ids = tuple(ranks[rank].engine_id for rank in sorted(ranks))
        return LegSupport(bootstrap=Bootstrap(found.host, found.port, engine_ids))


class MooncakeLegacy(Nixl):
    """Engines of vLLM with MooncakeConnector before it had bootstrap servers."""

    name: ClassVar[str] = "mooncake-legacy"
    summary: ClassVar[str] = (
        "MooncakeConnector of a vLLM before 0.14 whose /version does not say so"
    )
    lease_s: ClassVar[float] = 120.0
    """480 s in vLLM, 120 s in Mooncake's wheel (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)."""

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """None: these versions forget the parameters of a request that they refuse."""
        return None

    async def variant(self, pages: EnginePages) -> str:
        """By the version of vLLM."""
        return await _variant(pages, self.name)


async def _variant(pages: EnginePages, configured: str) -> str:
    """The family of an engine's version of MooncakeConnector; `configured` if it is unknown.

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
    return (Mooncake if number >= _TRANSFERS_FROM else MooncakeLegacy).name
