"""vLLM with MooncakeConnector: both legs at once, the decode engine asks for its KV beforehand.

Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py of vLLM 0.32
(`update_state_after_alloc`, `request_finished`). Both legs name one transfer; the decode leg names
the prefill engine's bootstrap server and which of its data-parallel ranks has the KV.
"""

from __future__ import annotations

from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar

import orjson

from kvrouter.engines.families.base import LegOrder, Rendezvous
from kvrouter.engines.families.vllm import TRANSFER, Vllm

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine


class Mooncake(Vllm):
    """Engines of vLLM with MooncakeConnector."""

    name: ClassVar[str] = "mooncake"
    order: ClassVar[LegOrder] = LegOrder.CONCURRENT
    lease_s: ClassVar[float] = 480.0

    def __init__(self) -> None:
        self._prefix = token_hex(8)
        self._numbers = count()

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A transfer of its own, on the data-parallel rank that `prefill` is."""
        bootstrap = prefill.identity.bootstrap if prefill.identity else None
        rank = prefill.rank or 0
        if bootstrap is None or rank >= len(bootstrap.engine_ids):
            raise LookupError(f"{prefill.address} has told no bootstrap server")
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
