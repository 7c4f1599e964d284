"""The interface of engine families: how the two legs of a request are written for one engine kind.

A family never opens a connection and never re-serialises a body: it splices the client's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from kvrouter.engines.families.pages import EnginePages, LegSupport
from kvrouter.engines.families.splice import pick, splice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrouter.engines.engine import CacheGroup, Engine
    from kvrouter.engines.families.parameter_table import ParameterTable
    from kvrouter.openai.request import Request

    Changes = dict[str, bytes | None]
    """Raw JSON of members that a body gets, by name; None leaves the client's out."""


class LegOrder(StrEnum):
    """In which order the legs of a request go, and how KV gets from one to the other."""

    STORE = "store"  # prefill, its KV lands in the store, decode: KV may be lost, never wrong
    HANDED = "handed over"  # prefill's answer says where to fetch: once, until a lease ends
    CONCURRENT = "concurrent"  # both at once: the engines meet at an address in both bodies
    SINGLE = "single"  # decode alone

    @property
    def fetches_once(self) -> bool:
        """Whether one prefill leg serves one decode leg of one sample."""
        return self in (LegOrder.HANDED, LegOrder.CONCURRENT)


class NothingLanded(StrEnum):
    """Why no block of a prompt came to decode by its prefill leg; a label of the metrics."""

    NOT_NAMED = "not_named"  # the answer names no KV: no connector is active, or it refuses
    SHORT_PROMPT = "short_prompt"  # it has no whole block before its last token
    UNKNOWN_TOKENS = "unknown_tokens"  # so that its blocks have no names
    TIMEOUT = "timeout"  # of the landing
    STORE_AWAY = "store_away"
    UNKNOWN_MANIFEST = "unknown_manifest"  # the store knows no engine that writes such blocks
    EVICTED = "evicted"  # what the store had went before decode could load it
    NOT_PUT = "not_put"  # the engine put nothing, and says no more
    ENGINE_STORE_AWAY = "engine_store_away"  # the engine does not reach it
    NOT_SHARED = "not_shared"  # the engine's settings, or the request, forbid it
    HOST_MEMORY = "host_memory"  # the engine had no room for blocks on their way to the store
    NO_TAIL = "no_tail"  # it kept no state, or no whole window, where the last block ends


class BadAnswer(Exception):
    """An engine's answer breaks its family's protocol; `Failure.ANSWER`."""


MOST_TOKENS: Final = 1 << 40  # more is an error of the engine


def told_tokens(value: object) -> int | None:
    """A number of tokens that an engine tells, None for null. ValueError: it can be none."""
    if value is None or (isinstance(value, int) and 0 <= value <= MOST_TOKENS):
        return value
    raise ValueError(f"{value!r:.60} is no number of tokens")


@dataclass(slots=True)
class Handoff:
    """What the answer of a prefill leg (or of a probe) reports. Not changed once it is read.

    `groups`, `refusal`, `waits`, `node`: see `Identity`.
    """

    prompt_token_ids: bytes | None = None  # raw JSON array
    ids: bytes | None = None  # the same as native uint32
    transfer_params: bytes | None = None  # raw JSON object for the decode leg, verbatim
    manifest: str | None = None  # hex digest; None without the store's connector
    groups: tuple[CacheGroup, ...] = ()
    blocks: int = 0  # leading blocks of the prompt that are or will be in the store
    cause: NothingLanded = NothingLanded.NOT_PUT  # why they are none
    block_tokens: int = 0  # 0: unknown
    root: bytes | None = None  # of the engine's block hashes
    refusal: str | None = None
    waits: bool = False
    node: str | None = None
    prompt_tokens: int | None = None  # of usage
    cached_tokens: int | None = None  # of usage; 0 for null, None without usage
    reused_tokens: int | None = None  # the same, None where the engine does not say it
    held_tokens: int | None = None  # of them, in its own cache; the rest came from the store
    missing: bool = False  # the engine was to say where its KV can be fetched, and did not
    fields: bytes | None = None  # header lines for the decode leg, instead of the request's

    def none_promised(self, blocks: int) -> NothingLanded:
        """Why none of the `blocks` that it promises can be awaited."""
        if blocks:
            return NothingLanded.UNKNOWN_TOKENS
        tokens = self.prompt_tokens
        short = tokens is not None and tokens <= (self.block_tokens or tokens)
        return NothingLanded.SHORT_PROMPT if short else self.cause


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the engines of two concurrent legs find each other; a new one for every attempt.

    A second use would mix up two requests, or crash schedulers.
    """

    prefill: dict[str, bytes]  # raw JSON of members of the leg's body, by name
    decode: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class PendingKv:
    """KV on its way into the store, for a decode leg that is sent before it is there."""

    blocks: int  # leading blocks of the prompt that will be there
    wait_s: float  # how long the engine waits for them before it computes
    node: str | None = None  # URL of the store node that gets them, if it is one of several


@dataclass(frozen=True, slots=True)
class KvSource:
    """KV of a prompt that a node of the store has, or will have, and an engine's own node lacks."""

    node: str  # its URL
    message_id: str  # of the hint to fetch it
    block_hashes: Sequence[int]  # low 64 bits, in order; none: unknown


class Family:
    """Dialect of one kind of engine; no state per request. The defaults transfer no KV.

    Detection awaits `EnginePages`; any of its methods may raise `ProbeFailed`.
    """

    name: ClassVar[str]
    """Value of `--kv-connector`."""
    summary: ClassVar[str]
    """What its engines are, for the help of `--kv-connector`."""
    connects_publisher: ClassVar[bool] = False
    """Whether its engines send KV events to `--kv-events-bind`."""
    parameters: ClassVar[ParameterTable]
    """What each leg does with each parameter."""
    order: ClassVar[LegOrder]
    detected_by: ClassVar[tuple[str, str] | None] = None
    """A page, and a member of its JSON object, that show `auto` an engine of this family."""
    health_path: ClassVar[str] = "/health"  # a GET of it answers 200 while the engine is well
    events_page: ClassVar[str | None] = None  # its JSON says where engines publish KV events
    prefill_members: ClassVar[Mapping[str, bytes]] = {}
    """Members of every prefill leg's body that transfer KV."""
    lease_s: ClassVar[float] = 0.0
    """How long a prefill engine keeps KV for a decode leg; 0: not at all."""
    unique_request_ids: ClassVar[bool] = False
    """Whether engines match the legs by `x-request-id`, so that no other leg may have theirs."""
    schedules_by_priority: ClassVar[bool] = False
    """Whether engines can be started so that the lowest `priority` goes first."""
    can_isolate: ClassVar[bool] = False
    """Whether a request can keep an engine from using cached KV: see `isolated_body`."""
    reads_salts: ClassVar[bool] = False
    """Whether its engines read a `cache_salt` at `SALTABLE`, if they do not list what they read."""
    varies_seeds: ClassVar[bool] = True
    """Whether an engine that draws several samples of a prompt gives sample i the seed + i."""

    # -- what a request needs

    def unsplittable(self, request: Request) -> str | None:
        """Why `request` must not be split in two legs (e.g. "echo"); None: it may be."""
        return None

    def hashable(self, request: Request) -> bool:
        """Whether token ids, cache salt and adapter alone determine its block hashes."""
        return False

    def needs_legs_per_sample(self, request: Request) -> bool:
        """Whether each of several samples needs legs of its own, since KV is fetched only once.

        ApiError 400: an engine would refuse so many samples, but would not see them.
        """
        return self.order.fetches_once and self.unsplittable(request) is None

    def reports_tokens(self, request: Request) -> bool:
        """Whether a streamed answer can name its tokens, and an engine can continue from them."""
        return False

    # -- bodies

    def tokenize_body(self, request: Request) -> bytes:
        """Body of POST /tokenize for a prompt that is text or messages."""
        return pick(request.body, request.spans, self.parameters.tokenized[request.kind])

    def prefill_body(
        self,
        request: Request,
        *,
        prompt_ids: bytes | None = None,
        want_ids: bool = False,
        rendezvous: Rendezvous | None = None,
        priority: int | None = None,
        source: KvSource | None = None,
    ) -> bytes:
        """Body of the prefill leg.

        Args:
            request: as parsed, with its original bytes.
            prompt_ids: JSON array of token ids in place of a text prompt.
            want_ids: whether the answer is to contain the prompt's token ids.
            rendezvous: of concurrent legs.
            priority: of the leg, where `schedules_by_priority`; None: the client's.
            source: KV which the engine's own node lacks.
        """
        table, given = self.parameters, request.spans.keys()
        changes: Changes = dict.fromkeys(table.left_out_on_prefill & given)
        changes.update(table.set_on_prefill)
        changes.update((name, raw) for name, raw in table.set_if_given.items() if name in given)
        if want_ids:
            changes["return_token_ids"] = b"true"
        if priority is not None and self.schedules_by_priority:
            changes["priority"] = b"%d" % priority
        changes.update(self._store_members(None, source))
        changes.update(self.prefill_members if rendezvous is None else rendezvous.prefill)
        self._put_ids(request, changes, prompt_ids)
        return splice(request.body, request.spans, changes)

    def decode_body(
        self,
        request: Request,
        handoff: Handoff | None,
        *,
        prompt_ids: bytes | None = None,
        pending: PendingKv | None = None,
        rendezvous: Rendezvous | None = None,
        want_ids: bool = False,
        source: KvSource | None = None,
    ) -> bytes:
        """Body of the decode leg.

        Args:
            request: as parsed, with its original bytes.
            handoff: from the prefill leg's answer; None without such a leg.
            prompt_ids: JSON array in place of a text prompt; None: that of the hand-off.
            pending: KV for which the engine is to wait, at `source` or else at its own node.
            rendezvous: of concurrent legs.
            want_ids: whether each event is to name its tokens.
            source: KV which the engine's own node lacks.
        """
        changes = self._left_out(request)
        if want_ids and self.reports_tokens(request):
            changes["return_token_ids"] = b"true"
        changes.update(self._store_members(pending, source))
        changes.update(self._decode_members(handoff))
        if rendezvous is not None:
            changes.update(rendezvous.decode)
        if prompt_ids is None and handoff is not None:
            prompt_ids = handoff.prompt_token_ids
        self._put_ids(request, changes, prompt_ids)
        return splice(request.body, request.spans, changes) if changes else request.body

    def isolated_body(self, request: Request, *, salt: bytes, prompt_ids: bytes | None) -> bytes:
        """Body of the whole request, whose prompt the engine computes without cached KV.

        Only where `can_isolate`. `salt` is raw JSON of a `cache_salt` that no other request has.
        """
        raise NotImplementedError

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """Body of a POST /v1/completions that makes a decode engine free what `params` name.

        The engine refuses it (400) without computing or fetching. None: only the end of the lease
        frees it.
        """
        return None

    def probe_body(self, model: str, *, priority: int | None = None) -> bytes | None:
        """Body of a POST /v1/completions of one token, whose answer describes the engine.

        With `priority` it also shows whether the engine takes one. None: no such probe.
        """
        return None

    def trial(self, model: str) -> tuple[str, bytes | None]:
        """Path and body of the smallest request that only a working core answers with a 200."""
        message = {"role": "user", "content": "a"}
        body = {"model": model, "messages": [message], "max_tokens": 1}
        return "/v1/chat/completions", orjson.dumps(body)

    def _left_out(self, request: Request) -> Changes:
        """The client's members that the decode leg never carries."""
        return dict.fromkeys(self.parameters.own & request.spans.keys())

    def _decode_members(self, handoff: Handoff | None) -> Changes:
        """Members that name the KV of the decode leg's prompt."""
        return {}

    def _store_members(self, pending: PendingKv | None, source: KvSource | None) -> Changes:
        """Members that tell the store's connector of either leg's engine where KV is."""
        return {}

    def _put_ids(self, request: Request, changes: Changes, ids: bytes | None) -> None:
        """Replace the prompt by its token ids, if the engine takes them."""

    # -- the exchange between the legs

    def new_rendezvous(self, prefill: Engine) -> Rendezvous:
        """A new rendezvous at `prefill`, if legs are concurrent; LookupError: it has no address."""
        raise NotImplementedError

    def read_prefill_answer(self, body: bytes) -> Handoff:
        """Read the prefill leg's answer; BadAnswer: it is not a completion's JSON."""
        raise BadAnswer("its family has no prefill leg")

    # -- detection

    async def detects(self, pages: EnginePages) -> bool:
        """Whether the engine's pages show `auto` an engine of this family."""
        if self.detected_by is None:
            return False
        page, member = self.detected_by
        return member in await pages.json(page)

    async def variant(self, pages: EnginePages) -> str:
        """The family of an engine that was configured as this one; versions may differ."""
        return self.name

    async def by_probe(self, handoff: Handoff, pages: EnginePages) -> str:
        """The family of an engine that `auto` found by `detected_by`, by the probe's answer."""
        return self.name

    async def generates(self, pages: EnginePages) -> bool:
        """Whether the engine was started to generate text."""
        return True

    async def legs(self, pages: EnginePages) -> LegSupport:
        """Which legs the engine can serve."""
        return LegSupport()

    async def event_ranks(self, pages: EnginePages) -> tuple[int, ...]:
        """Numbers of its data-parallel ranks in KV events; empty: it reports none."""
        return ()

    async def block_tokens(self, pages: EnginePages) -> int:
        """Tokens of one KV block, by its pages; 0: it does not say."""
        return 0

    async def kv_tokens(self, pages: EnginePages) -> int:
        """Tokens that the KV caches of all ranks hold, by its pages; 0: it does not say."""
        return 0

    async def version(self, pages: EnginePages) -> object:
        """The version of its server, as its JSON says it."""
        return None
