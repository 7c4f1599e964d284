"""SGLang: both legs at once, which meet in a room of the prefill engine's bootstrap server.

Sources, of SGLang 0.5.23: srt/entrypoints/openai/protocol.py (`PDRoutingFields`),
srt/disaggregation/{prefill,decode}.py and common/conn.py. Both bodies are the client's: the decode
engine continues from the first token that the prefill engine sampled, with its logprobs, and the
prefill engine shortens `max_tokens` itself. Without a room both refuse a request. The prefill leg
is not streamed, so that it fails with a status.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from secrets import randbelow
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from kvrouter.engines.engine import Bootstrap, Engine, Role
from kvrouter.engines.families.base import (
    BadAnswer,
    Family,
    Handoff,
    LegOrder,
    Rendezvous,
    told_tokens,
)
from kvrouter.engines.families.pages import MAX_RANKS, EnginePages, LegSupport, ProbeFailed
from kvrouter.engines.families.parameter_table import (
    Parameter,
    ParameterTable,
    Served,
    Tokenize,
    Treatment,
)
from kvrouter.engines.families.parameters import VLLM, steering
from kvrouter.http.bounded_json import bounded

if TYPE_CHECKING:
    from kvrouter.openai.request import Request

ROOM_BITS: Final = 63
INFO_PAGE: Final = "/server_info"
LEAST_BLOCK: Final = 16
"""Smaller pages make more names than they are worth; SGLang's default has one token."""


def _as_given(row: Parameter) -> Parameter:
    """The same row where both legs get the client's value: decode continues prefill's token."""
    served = Served.SPLIT if row.served is Served.ALONE else row.served
    if row.prefill in (Treatment.KEPT, Treatment.OWN) and served is row.served:
        return row
    return replace(row, prefill=Treatment.KEPT, value=b"", served=served, why="")


SGLANG: Final = ParameterTable(map(_as_given, VLLM.rows.values())).changed(
    Parameter(
        "stream", prefill=Treatment.SET, value=b"false", why="a failed leg has a status then"
    ),
    Parameter("stream_options", prefill=Treatment.DROPPED, why="refused without `stream`"),
    Parameter(
        "echo",
        tokenize=Tokenize.BARS,
        why="with `logprobs` a 400: the engine that decodes has not computed the prompt",
    ),
    *steering("routed_dp_rank data_parallel_rank"),
)
"""What SGLang's engines are sent."""


class Rooms:
    """Numbers that never repeat and that no other router uses, each for one of `ranks`.

    A random start and a random step visit all of them before one repeats.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._count = (1 << ROOM_BITS) // ranks
        self._next = randbelow(self._count)
        self._step = randbelow(self._count) or 1
        while gcd(self._step, self._count) > 1:
            self._step += 1

    def take(self, rank: int = 0) -> int:
        """A new room of that rank; not 0, which SGLang reserves."""
        self._next = (self._next + self._step) % self._count
        return self._next * self._ranks + rank or self.take(rank)


class Sglang(Family):
    """Engines of SGLang, disaggregated or whole."""

    name: ClassVar[str] = "sglang"
    summary: ClassVar[str] = "SGLang"
    parameters: ClassVar[ParameterTable] = SGLANG
    order: ClassVar[LegOrder] = LegOrder.CONCURRENT
    detected_by: ClassVar[tuple[str, str] | None] = (INFO_PAGE, "disaggregation_mode")
    reads_salts: ClassVar[bool] = True  # entrypoints/openai/serving_base.py, `_compute_extra_key`
    varies_seeds: ClassVar[bool] = False  # srt/managers/io_struct.py: sampling_params * n

    def __init__(self) -> None:
        self._rooms: dict[int, Rooms] = {}

    def unsplittable(self, request: Request) -> str | None:
        """Logprobs of the prompt: the engine that decodes has not computed it."""
        echo = request.raw("echo")
        return "echo" if echo == b"true" and request.raw("logprobs") is not None else None

    def hashable(self, request: Request) -> bool:
        """Completions: /tokenize does not render the messages of a chat."""
        return request.kind == "completion"

    def reports_tokens(self, request: Request) -> bool:
        """Completions; serving_chat.py refuses a streamed chat with `return_token_ids`."""
        return request.kind == "completion"

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A new room at the engine's bootstrap server, for the data-parallel rank that it is.

        Engines derive the rank from the room (`follow_bootstrap_room`) or read
        `disagg_prefill_dp_rank` instead of asking the bootstrap server.
        """
        bootstrap = prefill.identity.bootstrap if prefill.identity else None
        if bootstrap is None:
            raise LookupError(f"the bootstrap server of {prefill.address} is unknown")
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
        """Its usage; the decode engine has the KV by then."""
        try:
            usage = orjson.loads(bounded(body))["usage"] or {}
            details = usage.get("prompt_tokens_details")
            return Handoff(
                prompt_tokens=told_tokens(usage.get("prompt_tokens")),
                cached_tokens=told_tokens(details.get("cached_tokens")) or 0 if details else None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadAnswer(f"prefill answer: {error!r}") from None

    def trial(self, model: str) -> tuple[str, bytes | None]:
        """The page for which it generates a token (srt/entrypoints/http_server.py)."""
        return "/health_generate", None

    async def generates(self, pages: EnginePages) -> bool:
        """SGLang lists every endpoint; `is_embedding` says how it was started."""
        return (await pages.json(INFO_PAGE)).get("is_embedding") is not True

    async def legs(self, pages: EnginePages) -> LegSupport:
        """By its disaggregation mode, which must be the role under which it was named."""
        info, engine = await pages.json(INFO_PAGE), pages.engine
        mode = info.get("disaggregation_mode")
        if mode not in ("prefill", "decode"):
            return LegSupport(can_split=False)
        if engine.role is not Role(mode):
            raise ProbeFailed(
                f"it was started with --disaggregation-mode {mode}; name it under --{mode} alone"
            )
        if mode == "decode":
            return LegSupport(can_serve_whole=False)
        port = pages.bootstrap_port or info.get("disaggregation_bootstrap_port")
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ProbeFailed("its /server_info names no bootstrap port: give --bootstrap-port")
        return LegSupport(can_serve_whole=False, bootstrap=Bootstrap(engine.host, port))

    async def event_ranks(self, pages: EnginePages) -> tuple[int, ...]:
        """0 and up; `dp_size` is their number."""
        size = (await pages.json(INFO_PAGE)).get("dp_size")
        return tuple(range(size)) if isinstance(size, int) and 0 < size <= MAX_RANKS else ()

    async def block_tokens(self, pages: EnginePages) -> int:
        """`page_size`, if the engine publishes KV events: nothing else names its blocks."""
        info = await pages.json(INFO_PAGE)
        size = info.get("page_size") if info.get("kv_events_config") else None
        return size if isinstance(size, int) and size >= LEAST_BLOCK else 0

    async def kv_tokens(self, pages: EnginePages) -> int:
        """From /server_info, which tells it of one rank (managers/scheduler.py).

        0 with a hierarchical cache: the host holds more, and does not tell how much.
        """
        info = await pages.json(INFO_PAGE)
        told, ranks = info.get("max_total_num_tokens"), len(await self.event_ranks(pages)) or 1
        if not isinstance(told, int) or info.get("enable_hierarchical_cache"):
            return 0
        return told * ranks

    async def version(self, pages: EnginePages) -> object:
        """From /server_info; there is no /version."""
        return (await pages.json(INFO_PAGE)).get("version")
