"""Stores of other projects, which hold no lease and say nothing by themselves: the router polls.

The router asks whether KV exists, in JSON over HTTP, each time with a deadline. It never reads any.

Why a landing is not simply awaited: LMCache's coordinator hears only of what is put. After its
restart, or after one report that took longer than 2 s, it never learns what servers hold; then each
prompt on such a prefix would wait for --landing-timeout, and count as missing KV. So what the
prefill engine reused counts as there, and after `SILENCE` landings in a row that brought nothing
most are awaited for `BRIEF_S`, one in `SOUNDED` in full. Mooncake's master knows what it holds: its
landings are awaited as they are.

What a change must keep: silence never shortens a wait where a time-out counts as missing KV; an
answer that is late or too large costs one question, not the store; landings share `POLLS_PER_S`.
Tried: all token ids with each poll (200 ms of the coordinator's CPU at 128k tokens; by keys 1 ms),
and landings that poll in turn (beyond 200 at once all of them timed out).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from kvrouter.engines.families import uses_store
from kvrouter.http.bounded_json import bounded
from kvrouter.membership.bounded_answer import read_bounded
from kvrouter.prefix.groups import Leases
from kvrouter.prefix.stores.base import NOTHING_HELD, LandingOutcome, LandingResult, StoreMatch
from kvrouter_store.errors import KVStoreError, StoreRefused, StoreUnavailable
from kvrouter_store.identity.chain import HASH_BYTES
from kvrouter_store.system_errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.engine import Identity
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.stores.base import Origin, WantedBlocks

ANSWER_S: Final = 1.0  # for one answer, connecting included
HEALTH_S: Final = 1.0  # between two questions whether the store is well
KEPT_S: Final = 4.0
"""An idle connection; servers close theirs later, so that no question meets a closing one."""
MAX_ANSWER_BYTES: Final = 8 << 20  # LMCache answers a prompt of a million tokens with 7 MB
MAX_CONNECTIONS: Final = 32

Answer = TypeVar("Answer")
MATCH_S: Final = 2.0
"""For all questions of one match: more than for one, which shows that a store hangs."""
FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.2
POLLS_PER_S: Final = 200
"""Of all landings that are awaited, after their first: pauses grow beyond the longest for that."""
BRIEF_S: Final = 0.2  # for what will probably never be reported
SILENCE: Final = 3
"""Landings in a row that bring nothing new. Then most are awaited for `BRIEF_S`, until one comes,
where a time-out counts as a landing."""
SOUNDED: Final = 16  # one in so many of them is awaited in full
log = logging.getLogger(__name__)


@dataclass(eq=False)
class HttpPeer:
    """Asks one server over kept connections. Its owner calls `start`, and `close`.

    A question without an answer makes the server away: others then fail at once, until its health
    page answers again. So a server that hangs holds up few requests.
    """

    url: str  # SCHEME://HOST:PORT, as the operator wrote it
    health_path: str  # answers 200 with JSON while the server is well
    server: str  # what the URL must name, for people
    connected: bool = field(default=False, init=False)
    slow: bool = field(default=False, init=False)  # it is away for want of an answer in time
    _told: str = field(default="", init=False)  # its state, as the log has it
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self, wait_s: float) -> None:
        """Ask for its health, for at most `wait_s`, and follow it from now on."""
        with suppress(KVStoreError, TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.stats()
        self._watching = asyncio.create_task(self._watch(), name="store health")

    async def close(self) -> None:
        """Stop following, and close the connections. Idempotent."""
        self.connected = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def stats(self) -> dict[str, int]:
        """Ask its health page, also while it is away; it has no figures. Raises KVStoreError."""
        await self._ask(self.health_path, dict[str, Any], None)
        if not self.connected:
            self.connected, self.slow, self._told = True, False, ""
            log.info("store %s answers", self.url)
        return {}

    async def ask(self, path: str, kind: type[Answer], sent: bytes | None = None) -> Answer:
        """The 200 to a GET, or to a POST of JSON, read as `kind`.

        StoreUnavailable: it is away, did not answer in time, or answered what cannot be read.
        StoreRefused: it refused this question.
        """
        if not self.connected:
            raise StoreUnavailable(f"{self.url} is away")
        return await self._ask(path, kind, sent)

    def refusal(self, why: str) -> StoreRefused:
        """What to raise where it refuses what others may still ask; its reason is logged once."""
        return StoreRefused(self._tell("refuses a question", why))

    async def _ask(self, path: str, kind: type[Answer], sent: bytes | None) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        try:
            async with self._session.request(
                "GET" if sent is None else "POST",
                URL(f"http://{urlsplit(self.url).netloc}{path}", encoded=True),
                data=None if sent is None else BytesIO(sent),  # which aiohttp reads in pieces
                headers={} if sent is None else {"content-type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            ) as answer:
                content = await read_bounded(answer, MAX_ANSWER_BYTES, self.refusal)
            if answer.status == 200:
                return msgspec.json.decode(bounded(content, MAX_ANSWER_BYTES), type=kind)
        except TimeoutError:
            raise self._lost(f"no answer within {ANSWER_S:g} s", slow=True) from None
        except aiohttp.ClientConnectorError as error:
            raise self._lost(reason_of(error.os_error)) from None
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise self._lost(str(error) or type(error).__name__) from None
        told = f"{path.partition('?')[0]} answers {answer.status}"
        if path == self.health_path:
            raise self._lost(told)
        told += f": {content[:200]!r}"
        raise self.refusal(told) if 400 <= answer.status < 500 else self._lost(told)

    def _lost(self, why: str, *, slow: bool = False) -> StoreUnavailable:
        self.connected, self.slow = False, slow
        remedy = f"see that it runs, and that this is {self.server}"
        return StoreUnavailable(self._tell("is away", f"{why}; {remedy}"))

    def _tell(self, state: str, why: str) -> str:
        """Log what it is from now on, unless the log says so already."""
        text = f"store {self.url} {state}: {why}"
        if state != self._told:
            log.warning(text)
        self._told = state
        return text

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            with suppress(KVStoreError):
                await self.stats()


@dataclass(eq=False, slots=True)
class Question:
    """What is asked until it is there, and what is known of it."""

    manifest: str
    hashes: bytes
    upto: int  # leading blocks that are asked for
    origin: Origin | None
    found: int = 0  # of these, known to be there
    final: bool = False  # nothing is asked after this: how far has it come?
    missing: dict[object, int] = field(default_factory=dict)  # notes of the catalogue


class Catalogue(Protocol):
    """How one kind of store is asked for blocks, by its own names."""

    health_path: ClassVar[str]  # a page that answers 200 with JSON while the store is well
    keeps_engines: ClassVar[bool]  # whether engines need what is asked here, to store and to load
    server: ClassVar[str]  # what the URL must name, for people
    silence: ClassVar[str]  # why landings may never come, and what helps, for people
    forms: ClassVar[str]  # of the options, for people

    def named(self, identity: Identity) -> Identity:
        """The identity with the store's own name for it as manifest."""

    def possible(self, upto: int, origin: Origin | None) -> int:
        """How many of `upto` blocks can be there at all."""

    async def held(self, peer: HttpPeer, question: Question) -> int:
        """How many leading blocks are there; may be fewer unless it is the first or final look.

        Raises KVStoreError.
        """


@dataclass(eq=False)
class PollingView:
    """Matches by one look, and awaits landings by looking again, with growing pauses."""

    nodes: ClassVar[tuple[str, ...]] = ()
    out_of_reach: ClassVar[tuple[str, ...]] = ()

    peer: HttpPeer  # answers the catalogue; started and closed here
    catalogue: Catalogue
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _waiting: int = field(default=0, init=False)
    _silent: int = field(default=0, init=False)  # landings in a row that brought nothing new
    _since: int = field(default=0, init=False)  # landings that were awaited during that silence

    @property
    def clients(self) -> list[HttpPeer]:
        """See `StoreView`."""
        return [self.peer]

    @property
    def away(self) -> list[str]:
        """See `StoreView`."""
        return [] if self.peer.connected else [self.peer.url]

    async def start(self, wait_s: float) -> None:
        """See `StoreView`."""
        await self.peer.start(wait_s)

    async def close(self) -> None:
        """See `StoreView`."""
        await self.peer.close()

    async def joins(self, identity: Identity) -> Identity:
        """See `StoreView`. What cannot be asked for gets no name."""
        able = uses_store(identity.family) and identity.block_tokens
        return self.catalogue.named(identity) if able else identity

    def promised(self, handoff: Handoff, identity: Identity | None) -> tuple[str | None, int]:
        """All blocks that another engine can load: it always computes the last token."""
        if identity is None or not identity.block_tokens:
            return None, 0
        return identity.manifest, max(0, (handoff.prompt_tokens or 0) - 1) // identity.block_tokens

    def current(self, manifest: str) -> str:
        """See `StoreView`: no engine renames its blocks here."""
        return manifest

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> StoreMatch:
        """Leading blocks that are there; 0 if the store does not answer."""
        upto = self.catalogue.possible(len(hashes) // HASH_BYTES, origin)
        try:
            async with asyncio.timeout(MATCH_S):
                question = Question(manifest, hashes, upto, origin)
                blocks = await self.catalogue.held(self.peer, question)
        except (KVStoreError, TimeoutError):
            self.counts["match_failed"] += 1
            return NOTHING_HELD
        return StoreMatch(blocks)

    async def wait(self, wanted: WantedBlocks, deadline_s: float) -> LandingResult:
        """Poll until what is wanted is there. A lease of the result is empty.

        What the store never holds, as less than a chunk, is not awaited. Where it does not answer,
        and engines do without that, the answer of the prefill leg counts. Where they need it, and
        it answers too late, it may be well again before the deadline.
        """
        needed, until_s = self.catalogue.keeps_engines, self.clock() + deadline_s
        upto, origin, reused = wanted.upto, wanted.origin, wanted.reused
        told, before = min(wanted.held.blocks, upto), self._unreported(reused, upto, origin)
        asked, possible = (wanted.manifest, wanted.hashes), self.catalogue.possible(upto, origin)
        question = Question(*asked, possible, origin, max(told, before))
        self._waiting += 1
        try:
            if told < before:  # perhaps it is put just now: its report needs a moment
                await self._poll(Question(*asked, before, origin, told), min(BRIEF_S, deadline_s))
            left_s = max(0.0, until_s - self.clock())
            brief = not needed and reused is None and self._is_silent()
            outcome = await self._poll(question, min(BRIEF_S, left_s) if brief else left_s)
        finally:
            self._waiting -= 1
        self._hear(outcome, max(told, before), question)
        if outcome is LandingOutcome.LANDED:
            return LandingResult(outcome, upto, Leases())
        # What an engine says that it computed is put, and would be reported.
        counted = needed or (reused is not None and outcome is LandingOutcome.TIMEOUT)
        return LandingResult(outcome, question.found if counted else upto)

    def _unreported(self, reused: int | None, upto: int, origin: Origin | None) -> int:
        """Leading blocks that are there and may never be reported: an engine has reused them.

        A store that engines do without hears only of what is put. If it forgets, or if a report is
        lost, nobody tells it again.
        """
        if self.catalogue.keeps_engines or not reused or origin is None:
            return 0
        return self.catalogue.possible(min(upto, reused // origin.block_tokens), origin)

    def _is_silent(self) -> bool:
        """Whether landings seem not to come; now and then one is awaited in full all the same."""
        if self._silent < SILENCE:
            return False
        self._since += 1
        return self._since % SOUNDED != 0

    def _hear(self, outcome: LandingOutcome, known: int, question: Question) -> None:
        self.counts[outcome] += 1
        away = self.peer.slow or outcome is LandingOutcome.STORE_AWAY
        if away or known >= question.upto:
            return
        self._silent = 0 if question.found > known else self._silent + 1
        if self._silent == SILENCE:
            self._since = 0
            log.warning("%s has no news of landings: %s", self.peer.url, self.catalogue.silence)

    async def _poll(self, question: Question, limit_s: float) -> LandingOutcome:
        """Look until all is there. No landing takes more than half of the store's time."""
        until_s, pause_s = self.clock() + limit_s, 0.0
        try:
            async with asyncio.timeout(limit_s + ANSWER_S):  # the final answer may be late
                while question.found < question.upto:
                    if question.final:
                        return LandingOutcome.TIMEOUT
                    await self.sleep(min(pause_s, max(0.0, until_s - self.clock())))
                    begun_s = self.clock()
                    question.final = begun_s >= until_s
                    question.found = await self._look(question)
                    pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                    pause_s = max(pause_s, self._waiting / POLLS_PER_S, self.clock() - begun_s)
        except TimeoutError:
            return LandingOutcome.TIMEOUT
        except KVStoreError:
            return LandingOutcome.STORE_AWAY
        return LandingOutcome.LANDED

    async def _look(self, question: Question) -> int:
        """How many blocks are there now; as many as before where the answer came too late."""
        try:
            return await self.catalogue.held(self.peer, question)
        except StoreUnavailable:
            if not (self.peer.slow and self.catalogue.keeps_engines):
                raise
            return question.found
