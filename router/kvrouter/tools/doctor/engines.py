"""Engines: what names them, what the doctor learns of each by asking it, and the checks of that."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.engines.engine import Role
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.detect import EngineDetector
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import SourceContext
from kvrouter.membership.discovery.follow import SourceStatus
from kvrouter.redis.client import RedisClient
from kvrouter.tools.doctor.base import Finding, Found, Setup, error, warning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvrouter.engines.engine import Engine, Identity
    from kvrouter.membership.probe_client import ProbeResponse

T = TypeVar("T")

FIRST_MEMBERS_S: Final = 10.0
MAX_SKEW_S: Final = 1.0  # less does no harm, and hosts without NTP soon have more
_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_COMPUTED: Final = re.compile(
    r"^vllm:kv_offload_tiering_promotion_allocation_failures_total(?:\{.*\})? (\S+)$", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def read_sources(setup: Setup) -> list[SourceStatus]:
    """The first members of every source of --discovery; never raises for what a source does.

    What a source knows besides is added to `bootstrap_ports` and `nodes`.
    """
    settings = setup.settings
    url = settings.redis.get_secret_value()
    client = RedisClient(url) if url else None
    context = SourceContext(client, settings.redis_prefix, setup.bootstrap_ports, setup.nodes)
    try:
        return await asyncio.gather(*(_read(text, context) for text in settings.discovery))
    finally:
        if client is not None:
            await client.close()


async def _read(text: str, context: SourceContext) -> SourceStatus:
    """What it reported first: its members, or the problem why it cannot be read."""
    source = make_source(text, context)
    first = SourceStatus(source.name, lambda _: None)
    following = asyncio.create_task(source.follow(first))
    try:
        async with asyncio.timeout(FIRST_MEMBERS_S):
            await first.reported.wait()
    except TimeoutError:
        first.problem = f"it names no members within {FIRST_MEMBERS_S:g} s"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return first


@dataclass(slots=True)
class EngineFacts:
    """What is known of one engine."""

    engine: Engine  # with its identity and family, if it could be identified
    answers: bool = False  # whether it answered its health check
    problem: str | None = None  # why it does not, or could not be identified; None if it could
    # The least that its clock is ahead of this host's; negative if behind.
    clock_ahead_s: float | None = None
    # Of its KV cache, from its metrics, by vLLM's names.
    cache_config: Mapping[str, str] = field(default_factory=dict)
    blocks_without_room: int = 0  # that the store had, and that it computed for want of host memory

    @property
    def name(self) -> str:
        """Its role and address, as findings name it."""
        return f"{self.engine.role.value} engine {self.engine.address}"

    @property
    def identity(self) -> Identity:
        """What it is. Ask only for that of engines that could be identified."""
        assert self.engine.identity is not None
        return self.engine.identity


async def learn_engine(setup: Setup, engine: Engine) -> EngineFacts:
    """Ask one engine everything. Never raises for what the engine does."""
    facts, settings = EngineFacts(engine), setup.settings

    async def ask(engine: Engine, path: str, body: bytes | None) -> bytes:
        since_s = setup.host.clock()
        answer = await setup.answer(engine, path, body)
        if not facts.answers:
            facts.answers, until_s = True, setup.host.clock()
            facts.clock_ahead_s = lead_s(answer, since_s, until_s)
        return answer.body

    detector = EngineDetector(
        setup.families,
        ask,
        connector=settings.kv_connector,
        model=settings.model,
        bootstrap_ports=setup.bootstrap_ports,
        rank_counts=settings.rank_counts,
        asks_events=settings.asks_events,
    )
    try:
        await detector.check_health(engine)
        engine.identity = await detector.identify(engine)
    except ProbeFailed as problem:
        facts.problem = str(problem)
        if not facts.answers:
            return facts
    else:
        engine.family = engine.identity.family or engine.family
    page = (await setup.ask(engine, "/metrics") or b"").decode("utf-8", "replace")
    facts.cache_config = read_cache_config(page)
    facts.blocks_without_room = read_blocks_without_room(page)
    return facts


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


def read_cache_config(exposition: str) -> dict[str, str]:
    """The labels of vLLM's `vllm:cache_config_info`; empty without it."""
    found = _CACHE_CONFIG.search(exposition)
    return dict(_LABEL.findall(found[1])) if found else {}


def read_blocks_without_room(exposition: str) -> int:
    """Promotions of vLLM's offloading that found no room, in all; 0 without its metric."""
    return int(sum(map(float, _COMPUTED.findall(exposition))))


def odd_ones(values: Mapping[str, T]) -> tuple[list[str], T, T] | None:
    """The names whose value differs from the majority's, the first one's value, the majority's.

    None if all agree. Of two equal groups the one named last is right: decode engines, which have
    to use what prefill engines give them.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    most = max(counts.values())
    right = [value for value in values.values() if counts[value] == most][-1]
    odd = [name for name, value in values.items() if value != right]
    return odd, values[odd[0]], right


def model_groups(engines: Iterable[EngineFacts]) -> Iterator[tuple[str, list[EngineFacts]]]:
    """Each model that several engines serve, with them; a group of the same engines only once."""
    by_model: dict[str, list[EngineFacts]] = {}
    for each in engines:
        for model in each.identity.models:
            by_model.setdefault(model, []).append(each)
    seen: set[tuple[str, ...]] = set()
    for model, group in by_model.items():
        names = tuple(each.name for each in group)
        if len(group) > 1 and names not in seen:
            seen.add(names)
            yield model, group


async def discovery(setup: Setup) -> Found:
    """Every source of --discovery can be read and names engines."""
    for each in setup.discovered:
        subject = f"--discovery {each.name}"
        if each.problem is not None:
            yield error(
                subject,
                f"it cannot be read: {each.problem}",
                "correct what the sentence names; the router keeps the members that it knows, and "
                "waits",
            )
        elif not each.members:
            yield warning(subject, "it names no member", "add engines to it, or leave it out")


async def engine_reachable(setup: Setup) -> Found:
    """Every engine answers its health check in time."""
    for each in setup.engines:
        if each.problem is not None and not each.answers:
            yield error(
                each.name,
                f"it does not answer its health check: {each.problem}",
                "start it, or correct its address in --prefill and --decode; if it runs, look at "
                "its log and at firewalls between it and this host",
            )


async def engine_introduction(setup: Setup) -> Found:
    """Every engine names its models, family and ranks, and answers a request for one token."""
    for each in setup.engines:
        if each.problem is not None and each.answers:
            yield error(
                each.name,
                f"it answers its health check but cannot be identified: {each.problem}",
                "no request can be routed to it: do what the sentence says, or name its kind with "
                "--kv-connector",
            )


async def models(setup: Setup) -> Found:
    """Each engine's model is served by an engine of the other leg too."""
    known = setup.generating_engines
    prefill, decode = (
        [each for each in known if each.engine.role.serves(leg)]
        for leg in (Role.PREFILL, Role.DECODE)
    )
    if prefill and decode:
        for found in _alone(decode, prefill, "prefill") or _alone(prefill, decode, "decode"):
            yield found


def _alone(engines: list[EngineFacts], others: list[EngineFacts], leg: str) -> list[Finding]:
    """A finding for each of `engines` that shares no model with the `others`, which do `leg`."""
    served = {model for other in others for model in other.identity.models}
    return [
        error(
            each.name,
            f"it serves {', '.join(each.identity.models)}, which no {leg} engine does (they serve "
            f"{', '.join(sorted(served))}): prompts are not shared with it",
            "start it with the model of the others, or give both one --served-model-name if the "
            "model is the same",
        )
        for each in engines
        if not served & set(each.identity.models)
    ]


async def aliases(setup: Setup) -> Found:
    """A decode engine serves each model of each alias."""
    known = setup.known_engines
    decode = [each for each in known if each.engine.role.serves(Role.DECODE)]
    served = {model for each in decode for model in each.identity.models}
    for alias, versions in setup.settings.aliases.items():
        for model in sorted(versions.keys() - served):
            yield error(
                f"alias {alias}",
                f"it stands for {model}, which no decode engine serves (they serve "
                f"{', '.join(sorted(served)) or 'nothing'})",
                "correct the name in --model-alias, or start an engine of the model",
            )


async def context_length(setup: Setup) -> Found:
    """Engines of one model have one max_model_len."""
    for model, group in model_groups(setup.known_engines):
        lengths = {
            each.name: each.identity.max_model_len for each in group if each.identity.max_model_len
        }
        if odd := odd_ones(lengths):
            names, value, others = odd
            yield warning(
                ", ".join(names),
                f"max_model_len of {model} is {value} there and {others} elsewhere: one leg "
                "refuses a request that the other accepts",
                "start all engines of a model with the same --max-model-len",
            )


async def engine_version(setup: Setup) -> Found:
    """Engines of one family run one version."""
    by_family: dict[str, dict[str, str]] = {}
    for each in setup.generating_engines:
        if each.identity.version is not None:
            by_family.setdefault(each.engine.family, {})[each.name] = each.identity.version
    for family, versions in by_family.items():
        if odd := odd_ones(versions):
            names, value, others = odd
            yield warning(
                ", ".join(names),
                f"it runs version {value}, others of family {family} run {others}: they may "
                "understand KV layouts and requests differently",
                "run the same version on all engines that share KV; mix versions only during an "
                "upgrade",
            )


async def prefix_caching(setup: Setup) -> Found:
    """Engines of vLLM cache prefixes."""
    for each in setup.generating_engines:
        if each.cache_config.get("enable_prefix_caching") == "False":
            yield warning(
                each.name,
                "its prefix caching is off: it finds no block again, and names none",
                "start it with --enable-prefix-caching",
            )


async def host_memory(setup: Setup) -> Found:
    """Engines have host memory for all hits that come at once."""
    for each in setup.generating_engines:
        if each.blocks_without_room:
            yield warning(
                each.name,
                f"it computed {each.blocks_without_room} blocks that the store had: its host "
                "memory had no room for them",
                'give it a larger "cpu_bytes_to_use" in kv_connector_extra_config, and containers '
                "more memory and --shm-size",
            )


async def clock(setup: Setup) -> Found:
    """Clocks of engines (by their `Date` header) agree with this host's."""
    for each in setup.engines:
        skew_s = each.clock_ahead_s
        if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
            direction = "ahead of" if skew_s > 0 else "behind"
            yield warning(
                each.name,
                f"its clock is {abs(skew_s):.0f} s or more {direction} this host's: logs, traces "
                "and events cannot be put in order, and certificates may be invalid there",
                "let NTP (chrony, systemd-timesyncd) set the clocks of both hosts",
            )
