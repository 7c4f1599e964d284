"""SGLang: both legs at once, which meet in a room of the prefill engine's bootstrap server.

Sources, of SGLang 0.5.23: srt/entrypoints/openai/protocol.py (`PDRoutingFields`),
srt/disaggregation/{prefill,decode}.py and common/conn.py. Both bodies are the client's: the decode
engine takes over the first token that the prefill engine sampled, with its logprobs, and that one
cuts `max_tokens` itself. Without a room both refuse a request. The prefill leg is no stream, so
that it fails with a status.
"""

from __future__ import annotations

from math import gcd
from secrets import randbelow
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from kvrouter.engines.families.base import BadAnswer, Family, Handoff, LegOrder, Rendezvous
from kvrouter.engines.families.parameters import SGLANG

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families.table import ParameterTable
    from kvrouter.openai.request import Request

ROOM_BITS: Final = 63


class Rooms:
    """Numbers no two of which are equal, and which no other router hands out.

    A random start and a random step walk through all of them before one comes again.

    Args:
        ranks: data-parallel ranks of the engine: a room also says which of them prefills.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._count = (1 << ROOM_BITS) // ranks
        self._next = randbelow(self._count)
        self._step = randbelow(self._count) or 1
        while gcd(self._step, self._count) > 1:
            self._step += 1

    def take(self, rank: int = 0) -> int:
        """A room of that rank that was never taken; not 0, which SGLang has for itself."""
        self._next = (self._next + self._step) % self._count
        return self._next * self._ranks + rank or self.take(rank)


class Sglang(Family):
    """Engines of SGLang, disaggregated or whole."""

    name: ClassVar[str] = "sglang"
    parameters: ClassVar[ParameterTable] = SGLANG
    order: ClassVar[LegOrder] = LegOrder.CONCURRENT
    varies_seeds: ClassVar[bool] = False  # srt/managers/io_struct.py: sampling_params * n

    def __init__(self) -> None:
        self._rooms: dict[int, Rooms] = {}

    def unsplittable(self, request: Request) -> str | None:
        """Logprobs of the prompt: the engine that decodes has not computed it."""
        echo = request.raw("echo")
        if echo == b"true" and request.raw("logprobs") is not None:
            return "echo"
        return None

    def reports_tokens(self, request: Request) -> bool:
        """Completions; a chat that streams is refused with `return_token_ids` (serving_chat.py)."""
        return request.kind == "completion"

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A new room at the engine's bootstrap server, of the data-parallel rank that it is.

        The room says the rank as engines find it by themselves (`follow_bootstrap_room`), and
        `disagg_prefill_dp_rank` says it to those that would ask the bootstrap server for it.
        """
        bootstrap = prefill.identity.bootstrap if prefill.identity else None
        if bootstrap is None:
            raise LookupError(f"{prefill.address} has told no bootstrap server")
        ranks = len(prefill.server.ranks) or 1
        rooms = self._rooms.get(ranks)
        if rooms is None:
            rooms = self._rooms[ranks] = Rooms(ranks)
        members = {
            "bootstrap_host": orjson.dumps(bootstrap.bracketed),
            "bootstrap_port": b"%d" % bootstrap.port,
            "bootstrap_room": b"%d" % rooms.take(prefill.rank or 0),
        }
        if prefill.rank is not None:
            members["disagg_prefill_dp_rank"] = b"%d" % prefill.rank
        return Rendezvous(members, members)

    def read_prefill_answer(self, body: bytes) -> Handoff:
        """Its usage; the KV has gone to the decode engine by then."""
        try:
            answer = orjson.loads(body)
            usage = answer["usage"] or {}
            details = usage.get("prompt_tokens_details")
            return Handoff(
                prompt_tokens=usage.get("prompt_tokens"),
                cached_tokens=int(details.get("cached_tokens") or 0) if details else None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadAnswer(f"prefill answer: {error!r}") from None
