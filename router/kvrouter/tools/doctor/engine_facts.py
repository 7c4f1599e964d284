"""What can be learnt of one engine from outside: how it does, who it is, what its clock says."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.engines.families import AUTO
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.detect import EngineDetector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.engine import Engine
    from kvrouter.membership.probe_client import ProbeResponse
    from kvrouter.tools.doctor.base import SetUp

_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class EngineFacts:
    """What is known of one engine.

    Attributes:
        engine: with its identity and family, where it said who it is.
        away: why it cannot be asked at all, in a sentence; None where it can.
        unknown: why it did not say who it is; None where it did, or was not asked.
        version: as its /version tells; None where that tells none.
        ahead_s: how far its clock is ahead of this host's at least, in seconds; negative: behind;
            None where it does not tell.
        cache_config: what its metrics tell of its KV cache, by vLLM's names.
    """

    engine: Engine
    away: str | None = None
    unknown: str | None = None
    version: str | None = None
    ahead_s: float | None = None
    cache_config: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its role and address, as findings name it."""
        return f"{self.engine.role.value} engine {self.engine.address}"

    @property
    def models(self) -> tuple[str, ...]:
        """What it serves."""
        identity = self.engine.identity
        return identity.models if identity is not None else ()


async def learn_engine(setup: SetUp, engine: Engine) -> EngineFacts:
    """Ask one engine everything. Never raises for what the engine does."""
    facts = EngineFacts(engine)
    try:
        facts.ahead_s = await _health(setup, engine)
    except ProbeFailed as problem:
        facts.away = str(problem)
        return facts
    await asyncio.gather(
        _introduce(setup, facts), _read_version(setup, facts), _read_metrics(setup, facts)
    )
    return facts


async def _health(setup: SetUp, engine: Engine) -> float | None:
    """Its clock's lead in seconds, where it tells the time.

    Raises:
        ProbeFailed: it is not well.
    """
    connector = setup.settings.kv_connector
    path = "/health" if connector == AUTO else setup.families.named(connector).health_path
    ask = partial(setup.asker.ask, engine, body=None, deadline_s=setup.settings.health_timeout_s)
    since_s = setup.host.clock()
    try:
        answer = await ask(path=path)
    except ProbeFailed as problem:
        if problem.status != 404:  # a plain OpenAI server may have no such page
            raise
        answer = await ask(path="/v1/models")
    return lead_s(answer, since_s, setup.host.clock())


def lead_s(answer: ProbeResponse, since_s: float, until_s: float) -> float | None:
    """How far the engine's clock is ahead at least, by the `Date` of an answer between these times.

    0 where it may be right: a `Date` is cut to whole seconds, and an answer takes its time.
    """
    try:
        told_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    least, most = told_s - until_s, told_s + 1 - since_s
    return least if least > 0 else min(most, 0.0)


async def _introduce(setup: SetUp, facts: EngineFacts) -> None:
    settings, asker = setup.settings, setup.asker

    async def get(engine: Engine, path: str) -> bytes:
        return (await asker.ask(engine, path, None, settings.health_timeout_s)).body

    async def post(engine: Engine, path: str, body: bytes) -> bytes:
        return (await asker.ask(engine, path, body, setup.deadline_s)).body

    detector = EngineDetector(
        setup.families,
        get,
        post,
        connector=settings.kv_connector,
        model=settings.model,
        bootstrap_ports=settings.bootstrap_ports,
        rank_counts=settings.rank_counts,
    )
    engine = facts.engine
    try:
        engine.identity = await detector.identify(engine)
    except ProbeFailed as problem:
        facts.unknown = str(problem)
    else:
        engine.family = engine.identity.family or engine.family


async def _read_version(setup: SetUp, facts: EngineFacts) -> None:
    found = await _json(setup, facts.engine, "/version")
    version = found.get("version")
    facts.version = version if isinstance(version, str) else None


async def _read_metrics(setup: SetUp, facts: EngineFacts) -> None:
    timeout_s = setup.settings.health_timeout_s
    try:
        answer = await setup.asker.ask(facts.engine, "/metrics", None, timeout_s)
    except ProbeFailed:
        return
    facts.cache_config = read_cache_config(answer.body.decode("utf-8", "replace"))


async def _json(setup: SetUp, engine: Engine, path: str) -> dict[str, Any]:
    """The JSON object at `path`; empty where there is none."""
    try:
        answer = await setup.asker.ask(engine, path, None, setup.settings.health_timeout_s)
        found = orjson.loads(answer.body)
    except (ProbeFailed, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_cache_config(exposition: str) -> dict[str, str]:
    """The labels of vLLM's `vllm:cache_config_info`; empty where there is none."""
    found = _CACHE_CONFIG.search(exposition)
    return dict(_LABEL.findall(found[1])) if found else {}
