"""Finds out what an engine is when it joins: its family, its models, the KV that it needs."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.families import AUTO, Families
from kvrouter.engines.families.base import BadAnswer, Family, Handoff
from kvrouter.engines.families.pages import MAX_RANKS, EnginePages, LegSupport, ProbeFailed
from kvrouter.http.bounded_json import bounded
from kvrouter.openai.endpoints import COMPLETIONS, GENERATION, listed, salted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.engines.families.pages import Ask

MODELS_PATH: Final = "/v1/models"
_NOT_THERE: Final = frozenset({404, 405, 501})
NO_COMPLETIONS: Final = "does not support Completions API"
"""In vLLM's 400 before it left out what its model cannot do (entrypoints/openai/api_server.py)."""
MAX_VERSION: Final = 64
PROBE_PRIORITY: Final = 1  # any but 0: vLLM's V0 engine refuses it unless it schedules by priority
RESOLVE_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineDetector:
    """Identifies engines."""

    families: Families  # the dialects
    ask: Ask  # sends requests; a POST may wait its turn among the engine's other requests
    connector: str = "store"  # the family of all engines, or "auto"
    model: str | None = None  # the one model to serve; None: every model of the engines
    # By the engine's address; under "" that of all others. Discovery may add some later.
    bootstrap_ports: Mapping[str, int] = field(default_factory=dict)
    # Numbers of data-parallel ranks, likewise; they override what engines report.
    rank_counts: Mapping[str, int] = field(default_factory=dict)
    try_priority: bool = False  # whether to find out which prefill engines take a `priority`
    asks_events: Callable[[str], bool] = lambda _: False
    """Whether an engine, by its address, is asked where it publishes KV events."""

    async def identify(self, engine: Engine) -> Identity:
        """All that the router needs to know of `engine`; ProbeFailed: it does not answer well."""
        cards = await self._cards(engine)
        served = self._served(cards)
        pages = EnginePages(engine, self.ask, _of(self.bootstrap_ports, engine), cards[0].owned_by)
        endpoints, with_salt = await _endpoints(pages)
        family = await self._family(pages)
        probe = None
        generates = endpoints is None or not endpoints.isdisjoint(GENERATION)
        if generates and await family.generates(pages):
            probe = await self._probe(engine, family, served.models[0])
        handoff, takes_priority = probe or (Handoff(), False)
        legs, block_tokens, kv_tokens = LegSupport(can_split=False), 0, 0
        if probe is not None:
            if self.connector == AUTO:
                family = self.families.named(await family.by_probe(handoff, pages))
            legs = await family.legs(pages)
            block_tokens = handoff.block_tokens or await family.block_tokens(pages)
            kv_tokens = await family.kv_tokens(pages)
        version = await family.version(pages)
        event_ports, events_refused = await self._event_ports(pages, family.events_page)
        return replace(
            served,
            event_ports=event_ports,
            events_refused=events_refused,
            block_tokens=block_tokens or None,
            manifest=handoff.manifest,
            groups=handoff.groups,
            node=handoff.node,
            root=handoff.root,
            refusal=handoff.refusal,
            waits=handoff.waits,
            family=family.name,
            can_split=legs.can_split,
            can_serve_whole=legs.can_serve_whole,
            bootstrap=legs.bootstrap,
            ranks=self._ranks(engine, await family.event_ranks(pages), legs),
            version=version[:MAX_VERSION] if isinstance(version, str) else None,
            generates=probe is not None,
            endpoints=endpoints,
            salted=with_salt,
            takes_priority=takes_priority,
            kv_tokens=kv_tokens or None,
        )

    async def check_health(self, engine: Engine) -> None:
        """Ask for its health page, unless `served` asks the same; ProbeFailed: it is not well."""
        family = self.connector
        if family == AUTO and engine.identity is not None:
            family = engine.family
        path = "/health" if family == AUTO else self.families.named(family).health_path
        if path == MODELS_PATH:
            return
        try:
            await self.ask(engine, path, None)
        except ProbeFailed as error:
            if family != AUTO or error.status != 404:  # a plain OpenAI server may have no such page
                raise

    async def try_core(self, engine: Engine) -> None:
        """Have it compute a token; ProbeFailed: its core does not. A refusal shows nothing."""
        path, body = self.families.of(engine).trial(engine.models_before[0])
        try:
            await self.ask(engine, path, body)
        except ProbeFailed as error:
            if not 400 <= error.status < 500:
                raise

    async def served(self, engine: Engine) -> Identity:
        """The models that `engine` serves now, as an identity without the rest.

        ProbeFailed: it does not answer, or does not serve the one model that it should.
        """
        return self._served(await self._cards(engine))

    async def _cards(self, engine: Engine) -> list[Card]:
        return read_models(await self.ask(engine, MODELS_PATH, None))

    def _served(self, cards: list[Card]) -> Identity:
        models = tuple(dict.fromkeys(card.id for card in cards))
        if self.model is not None:
            if self.model not in models:
                raise ProbeFailed(f"it serves {', '.join(models)}, not --model {self.model}")
            models = (self.model,)
        adapters = tuple((card.id, card.root) for card in cards if card.parent and card.root)
        path = cards[0].root
        return Identity(models, cards[0].max_model_len, adapters=adapters, model_path=path)

    async def _family(self, pages: EnginePages) -> Family:
        """The family of an engine, as far as its pages show it."""
        if self.connector == AUTO:
            return await self.families.detect(pages)
        return self.families.named(await self.families.named(self.connector).variant(pages))

    async def _probe(
        self, engine: Engine, family: Family, model: str
    ) -> tuple[Handoff, bool] | None:
        """What the answer to the smallest request reports, and whether it took a `priority`.

        None: the engine does not generate text.
        """
        probe, handoff = family.probe_body(model), Handoff()
        ranks = self.try_priority and family.schedules_by_priority
        try:
            if ranks and engine.role.serves(Role.PREFILL):
                ranked = family.probe_body(model, priority=PROBE_PRIORITY)
                if ranked and (answer := await self._ask_priority(engine, ranked)):
                    return _read(family, answer), True
            if probe is not None:
                handoff = _read(family, await self.ask(engine, COMPLETIONS, probe))
        except ProbeFailed as error:
            if error.status in _NOT_THERE or NO_COMPLETIONS in str(error):
                return None
            raise
        return handoff, False

    async def _ask_priority(self, engine: Engine, probe: bytes) -> bytes | None:
        """The answer to a request with a `priority`; None: the engine takes none."""
        try:
            return await self.ask(engine, COMPLETIONS, probe)
        except ProbeFailed as error:
            if error.status != 400 or NO_COMPLETIONS in str(error):
                raise
            log.info("engine %s takes no `priority`: %s", engine.address, error)
            return None

    async def _event_ports(
        self, pages: EnginePages, page: str | None
    ) -> tuple[Mapping[int, tuple[int, int]], str | None]:
        """See `read_event_sources`. No page of events keeps an engine that answers out."""
        if page is None or not self.asks_events(pages.engine.address):
            return {}, None
        try:
            return await read_event_sources(pages.engine.host, await pages.json(page))
        except ProbeFailed as error:
            if error.ours or error.silent:  # the next check asks again
                raise
            return {}, str(error)

    def _ranks(
        self, engine: Engine, reported: tuple[int, ...], legs: LegSupport
    ) -> tuple[int, ...]:
        """Numbers of its data-parallel ranks in KV events: as it reports, or 0 and up.

        Where a bootstrap server names the ranks, decode engines need those names: they override the
        configured number.
        """
        named = len(legs.bootstrap.engine_ids) if legs.bootstrap is not None else 0
        count = named or _of(self.rank_counts, engine) or len(reported)
        if reported and count != len(reported) and (named or count != 1):
            raise ProbeFailed(
                f"it reports {len(reported)} data-parallel ranks, not {count}"
                + (": not all are there yet" if named else ", as --data-parallel-size says")
            )
        if count > MAX_RANKS:
            raise ProbeFailed(f"it has {count} data-parallel ranks: give --data-parallel-size 1")
        return reported if count == len(reported) else tuple(range(count)) if count > 1 else ()


class Card(msgspec.Struct):
    """One model of /v1/models; an adapter has its base as `parent` and its path as `root`."""

    id: str
    owned_by: object = None
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


def read_models(body: bytes) -> list[Card]:
    """The models that /v1/models names; ProbeFailed: it names none."""
    try:
        cards = msgspec.json.decode(bounded(body), type=_Cards).data
    except (ValueError, RecursionError) as error:  # msgspec raises more than its own
        raise ProbeFailed(f"/v1/models is not OpenAI's list ({error})") from None
    if not cards:
        raise ProbeFailed("/v1/models names no model")
    return cards


async def _endpoints(
    pages: EnginePages,
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Those of the router's endpoints that an engine lists, and paths that read a `cache_salt`.

    None: it lists none.

    vLLM's /openapi.json lists what its model can do (entrypoints/openai/api_server.py,
    `build_app`). A server that names none of them there may serve them in another way.
    """
    try:
        document = await pages.json("/openapi.json")
    except ProbeFailed as error:
        if error.ours or error.silent:  # the next check asks again
            raise
        return None, None  # an engine that cannot make its schema may be well all the same
    paths = document.get("paths")
    found = listed(paths) if isinstance(paths, dict) else frozenset()
    return (found, salted(document)) if found else (None, None)


def _read(family: Family, answer: bytes) -> Handoff:
    try:
        return family.read_prefill_answer(answer)
    except BadAnswer as error:
        raise ProbeFailed(str(error)) from None


def _of(numbers: Mapping[str, int], engine: Engine) -> int | None:
    """The number that is configured for `engine`, or for all others."""
    return numbers.get(engine.address) or numbers.get("")


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


async def read_event_sources(
    host: str, told: dict[str, Any]
) -> tuple[dict[int, tuple[int, int]], str | None]:
    """Ports of events and of replays (0: none) by rank, and why not all are used.

    vLLM 0.33 answers GET /kv_event_sources (entrypoints/serve/instrumentator/basic.py) with a
    `KVEventsConfig` for each data-parallel rank. Its endpoints are as configured, plus the rank,
    or, for `tcp://*:0`, where the kernel bound them. They must not lead the router elsewhere: it
    connects to the host under which it knows the engine. Wildcards, loopback and that host's
    addresses mean it.
    """
    found: dict[int, tuple[int, int]] = {}
    try:
        sources = msgspec.convert(told, dict[int, _Source], str_keys=True)
    except msgspec.ValidationError as error:
        return found, f"they are not told as vLLM does ({error})"
    names, refused = await _names(host) if sources else set(), None
    for rank, source in list(sources.items())[:MAX_RANKS]:
        try:
            replays = _port(source.replay_endpoint, names) if source.replay_endpoint else 0
            found[rank] = _port(source.endpoint, names), replays
        except ValueError as error:
            refused = str(error)
    return found, refused


async def _names(host: str) -> set[str]:
    """What stands for an engine's host in its endpoints; "": any wildcard or loopback address."""
    names = {"", host}
    with suppress(OSError):  # also TimeoutError
        async with asyncio.timeout(RESOLVE_S):
            resolved = await asyncio.get_running_loop().getaddrinfo(host, None)
        names |= {_plain(str(address[0])) for *_, address in resolved}
    return names


def _port(endpoint: str, names: set[str]) -> int:
    """The port of an endpoint; ValueError: why it is not used."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.port:
        raise ValueError(f"{endpoint[:200]!r} is no tcp://HOST:PORT")
    if _plain(parts.hostname or "*") not in names:
        raise ValueError(f"{endpoint[:200]!r} is on another host")
    return parts.port


def _plain(host: str) -> str:
    """A host in one form; "" for any wildcard or loopback address."""
    if host in ("*", "localhost"):
        return ""
    with suppress(ValueError):
        address = ip_address(host)
        return "" if address.is_unspecified or address.is_loopback else str(address)
    return host
