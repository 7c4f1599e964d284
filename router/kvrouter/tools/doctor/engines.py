"""Checks of engines one by one, and of the models that they serve together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.engines.engine import Role
from kvrouter.tools.doctor.base import Finding, Found, Setup, error, warning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvrouter.tools.doctor.engine_facts import EngineFacts

T = TypeVar("T")

MAX_SKEW_S: Final = 1.0
"""Less does no harm, and hosts without NTP soon have more."""


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
        for model in each.models:
            by_model.setdefault(model, []).append(each)
    seen: set[tuple[str, ...]] = set()
    for model, group in by_model.items():
        names = tuple(each.name for each in group)
        if len(group) > 1 and names not in seen:
            seen.add(names)
            yield model, group


async def engine_reachable(setup: Setup) -> Found:
    """Every engine answers its health check in time."""
    for each in await setup.all_engines():
        if each.unreachable is not None:
            yield error(
                each.name,
                f"it does not answer its health check: {each.unreachable}",
                "start it, or correct its address in --prefill and --decode; if it runs, look at "
                "its log and at firewalls between it and this host",
            )


async def engine_introduction(setup: Setup) -> Found:
    """Every engine names its models, family and ranks, and answers a request for one token."""
    for each in await setup.all_engines():
        if each.unidentified is not None:
            yield error(
                each.name,
                f"it answers its health check but cannot be identified: {each.unidentified}",
                "no request can be routed to it: do what the sentence says, or name its kind with "
                "--kv-connector",
            )


async def models(setup: Setup) -> Found:
    """Each engine's model is served by an engine of the other leg too."""
    known = await setup.generating_engines()
    prefill, decode = (
        [each for each in known if each.engine.role.serves(leg)]
        for leg in (Role.PREFILL, Role.DECODE)
    )
    if prefill and decode:
        for found in _alone(decode, prefill, "prefill") or _alone(prefill, decode, "decode"):
            yield found


def _alone(engines: list[EngineFacts], others: list[EngineFacts], leg: str) -> list[Finding]:
    """A finding for each of `engines` that shares no model with the `others`, which do `leg`."""
    served = {model for other in others for model in other.models}
    return [
        error(
            each.name,
            f"it serves {', '.join(each.models)}, which no {leg} engine does (they serve "
            f"{', '.join(sorted(served))}): prompts are not shared with it",
            "start it with the model of the others, or give both one --served-model-name if the "
            "model is the same",
        )
        for each in engines
        if not served & set(each.models)
    ]


async def aliases(setup: Setup) -> Found:
    """A decode engine serves each model of each alias."""
    known = await setup.known_engines()
    decode = [each for each in known if each.engine.role.serves(Role.DECODE)]
    served = {model for each in decode for model in each.models}
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
    for model, group in model_groups(await setup.known_engines()):
        lengths = {
            each.name: each.engine.identity.max_model_len
            for each in group
            if each.engine.identity is not None and each.engine.identity.max_model_len
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
    for each in await setup.generating_engines():
        identity = each.engine.identity
        if identity is not None and identity.version is not None:
            by_family.setdefault(each.engine.family, {})[each.name] = identity.version
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
    for each in await setup.generating_engines():
        if each.cache_config.get("enable_prefix_caching") == "False":
            yield warning(
                each.name,
                "its prefix caching is off: it finds no block again, and names none",
                "start it with --enable-prefix-caching",
            )


async def host_memory(setup: Setup) -> Found:
    """Engines have host memory for all hits that come at once."""
    for each in await setup.generating_engines():
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
    for each in await setup.all_engines():
        skew_s = each.clock_ahead_s
        if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
            direction = "ahead of" if skew_s > 0 else "behind"
            yield warning(
                each.name,
                f"its clock is {abs(skew_s):.0f} s or more {direction} this host's: logs, traces "
                "and events cannot be put in order, and certificates may be invalid there",
                "let NTP (chrony, systemd-timesyncd) set the clocks of both hosts",
            )
