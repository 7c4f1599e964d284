"""vLLM with MooncakeConnector: both legs at once, the decode engine asks for its KV beforehand.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py of vLLM 0.32
(`update_state_after_alloc`, `request_finished`). Both legs name one transfer; the decode leg names
the prefill engine's bootstrap server and which of its data-parallel ranks has the KV.
"""

from __future__ import annotations

from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import orjson

from kvrouter.engines.engine import Bootstrap, Role
from kvrouter.engines.families.base import LegOrder, Rendezvous
from kvrouter.engines.families.mooncake_legacy import mooncake_variant
from kvrouter.engines.families.pages import LegSupport, ProbeFailed
from kvrouter.engines.families.vllm import TRANSFER, Vllm

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.pages import EnginePages

BOOTSTRAP_PORT: Final = 8998
"""VLLM_MOONCAKE_BOOTSTRAP_PORT's default."""


class _Rank(msgspec.Struct):
    engine_id: str


class Mooncake(Vllm):
    """Engines of vLLM with MooncakeConnector."""

    name: ClassVar[str] = "mooncake"
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
        return await mooncake_variant(pages, self.name)

    async def legs(self, pages: EnginePages) -> LegSupport:
        """A prefill engine's bootstrap server must know all of its data-parallel ranks."""
        engine = pages.engine
        if not engine.role.serves(Role.PREFILL):
            return LegSupport()
        found = Bootstrap(engine.host, pages.bootstrap_port or BOOTSTRAP_PORT)
        url = f"http://{found.bracketed}:{found.port}/query"
        try:
            ranks = msgspec.json.decode(await pages.body(url), type=dict[int, _Rank])
        except ProbeFailed as error:
            raise ProbeFailed(f"MooncakeConnector's bootstrap server: {error}") from None
        except (ValueError, RecursionError) as error:  # msgspec raises more than its own
            raise ProbeFailed(f"{url} is not MooncakeConnector's ({error})") from None
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ProbeFailed(f"{url}: not all of its data-parallel ranks are there yet")
        engine_ids = tuple(ranks[rank].engine_id for rank in sorted(ranks))
        return LegSupport(bootstrap=Bootstrap(found.host, found.port, engine_ids))
