"""What the doctor learns of one engine by asking it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families import AUTO
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.detect import EngineDetector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.membership.probe_client import ProbeResponse
    from kvrouter.tools.doctor.base import Setup

_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_COMPUTED: Final = re.compile(
    r"^vllm:kv_offload_tiering_promotion_allocation_failures_total(?:\{.*\})? (\S+)$", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class EngineFacts:
    """What is known of one engine.

    Attributes:
        engine: with its identity and family, if it could be identified.
        unreachable: why it does not answer its health check; None if it does.
        unidentified: why it could not be identified; None if it could, or was not asked.
        clock_ahead_s: the least that its clock is ahead of this host's; negative if behind.
        cache_config: of its KV cache, from its metrics, by vLLM's names.
        blocks_without_room: that the store had, and that it computed for want of host memory.
    """

    engine: Engine
    unreachable: str | None = None
    unidentified: str | None = None
    clock_ahead_s: float | None = None
    cache_config: Mapping[str, str] = field(default_factory=dict)
    blocks_without_room: int = 0

    @property
    def name(self) -> str:
        """Its role and address, as findings name it."""
        return f"{self.engine.role.value} engine {self.engine.address}"

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it serves."""
        identity = self.engine.identity
        return identity.models if identity is not None else ()

    @property
    def block_tokens(self) -> int | None:
        """Tokens of one of its KV blocks, or None."""
        identity = self.engine.identity
        return identity.block_tokens if identity is not None else None


async def learn_engine(setup: Setup, engine: Engine) -> EngineFacts:
    """Ask one engine everything. Never raises for what the engine does."""
    facts = EngineFacts(engine)
    try:
        facts.clock_ahead_s = await _health(setup, engine)
    except ProbeFailed as problem:
        facts.unreachable = str(problem)
        return facts
    _, metrics = await asyncio.gather(_identify(setup, facts), setup.ask(engine, "/metrics"))
    page = (metrics or b"").decode("utf-8", "replace")
    facts.cache_config = read_cache_config(page)
    facts.blocks_without_room = read_blocks_without_room(page)
    return facts


async def _health(setup: Setup, engine: Engine) -> float | None:
    """How far the clock of a healthy engine is ahead. Raises ProbeFailed."""
    connector, timeout_s = setup.settings.kv_connector, setup.settings.health_timeout_s
    path = "/health" if connector == AUTO else setup.families.named(connector).health_path
    since_s = setup.host.clock()
    try:
        answer = await setup.probe.ask(engine, path, None, timeout_s)
    except ProbeFailed as problem:
        if problem.status != 404:  # a plain OpenAI server may have no such page
            raise
        answer = await setup.probe.ask(engine, "/v1/models", None, timeout_s)
    return lead_s(answer, since_s, setup.host.clock())


def lead_s(answer: ProbeResponse, since_s: float, until_s: float) -> float | None:
    """The least that the clock of an engine is ahead, by the `Date` of an answer between two times.

    0 if it may be right: a `Date` has whole seconds, and an answer takes time. None without `Date`.
    """
    try:
        date_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    least, most = date_s - until_s, date_s + 1 - since_s
    return least if least > 0 else min(most, 0.0)


async def _identify(setup: Setup, facts: EngineFacts) -> None:
    async def ask(engine: Engine, path: str, body: bytes | None) -> bytes:
        return (await setup.probe.ask(engine, path, body, setup.patience_s(body))).body

    settings, engine = setup.settings, facts.engine
    detector = EngineDetector(
        setup.families,
        ask,
        connector=settings.kv_connector,
        model=settings.model,
        bootstrap_ports=setup.bootstrap_ports,
        rank_counts=settings.rank_counts,
    )
    try:
        engine.identity = await detector.identify(engine)
    except ProbeFailed as problem:
        facts.unidentified = str(problem)
    else:
        engine.family = engine.identity.family or engine.family


def read_cache_config(exposition: str) -> dict[str, str]:
    """The labels of vLLM's `vllm:cache_config_info`; empty without it."""
    found = _CACHE_CONFIG.search(exposition)
    return dict(_LABEL.findall(found[1])) if found else {}


def read_blocks_without_room(exposition: str) -> int:
    """Promotions of vLLM's offloading that found no room, in all; 0 without its metric."""
    return int(sum(map(float, _COMPUTED.findall(exposition))))
