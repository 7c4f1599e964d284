"""Checks of engines one by one, and of what they serve together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter.engines.engine import Role
from kvrouter.tools.doctor.base import Check, SetUp, error, warning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvrouter.tools.doctor.base import Finding, Found
    from kvrouter.tools.doctor.engine_facts import EngineFacts

T = TypeVar("T")


def odd_ones(values: Mapping[str, T]) -> tuple[list[str], T, T] | None:
    """Who differs from the most: their names, the first one's value, and the most's.

    None where all agree. Of two that are as many, those named last are in the right: decode
    engines, which have to live with what they are given.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    most = max(counts.values())
    right = [value for value in values.values() if counts[value] == most][-1]
    odd = [name for name, value in values.items() if value != right]
    return odd, values[odd[0]], right


def model_groups(engines: Iterable[EngineFacts]) -> Iterator[tuple[str, list[EngineFacts]]]:
    """Each model that several engines serve, with them; a group of the same engines once."""
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


async def _reachable(setup: SetUp) -> Found:
    for each in await setup.all_engines():
        if each.away is not None:
            yield error(
                each.name,
                f"it does not answer its health check: {each.away}",
                "start it, or mend its address in --prefill and --decode; where it runs, look at "
                "its log and at firewalls between it and this host",
            )


async def _introduced(setup: SetUp) -> Found:
    for each in await setup.all_engines():
        if each.unknown is not None:
            yield error(
                each.name,
                f"it answers its health check, but does not say who it is: {each.unknown}",
                "no request can be routed to it: do what the sentence says, or name its kind with "
                "--kv-connector",
            )


async def _models(setup: SetUp) -> Found:
    known = await setup.generating_engines()
    prefill = [each for each in known if each.engine.role.serves(Role.PREFILL)]
    decode = [each for each in known if each.engine.role.serves(Role.DECODE)]
    if prefill and decode:
        found = _alone(decode, prefill, "prefill") or _alone(prefill, decode, "decode")
        for each in found:
            yield each


def _alone(engines: list[EngineFacts], others: list[EngineFacts], leg: str) -> list[Finding]:
    """Those of `engines` whose models none of the `others`, which do `leg`, serves."""
    served = {model for other in others for model in other.models}
    return [
        error(
            each.name,
            f"it serves {', '.join(each.models)}, which no {leg} engine does (they serve "
            f"{', '.join(sorted(served))}): prompts are not shared with it",
            "start it with the model of the others, or give both --served-model-name one name if "
            "the model is the same",
        )
        for each in engines
        if not served & set(each.models)
    ]


async def _context_length(setup: SetUp) -> Found:
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
                f"max_model_len of {model} is {value} there and {others} elsewhere: a request "
                "that fits one leg is refused by the other",
                "start all engines of a model with the same --max-model-len",
            )


async def _versions(setup: SetUp) -> Found:
    by_family: dict[str, dict[str, str]] = {}
    for each in await setup.generating_engines():
        if each.version is not None:
            by_family.setdefault(each.engine.family, {})[each.name] = each.version
    for family, versions in by_family.items():
        if odd := odd_ones(versions):
            names, value, others = odd
            yield warning(
                ", ".join(names),
                f"it runs version {value}, others of family {family} run {others}: KV layouts "
                "and requests may be understood differently",
                "run the same version on all engines that share KV; mix versions only while you "
                "upgrade",
            )


async def _prefix_caching(setup: SetUp) -> Found:
    for each in await setup.generating_engines():
        if each.cache_config.get("enable_prefix_caching") == "False":
            yield warning(
                each.name,
                "its prefix caching is off: it keeps no block to be found again, and names none",
                "start it with --enable-prefix-caching",
            )


CHECKS: Final = (
    Check("engine-reachable", "every engine answers its health check in time", _reachable),
    Check(
        "engine-introduction",
        "every engine says who it is: models, family, ranks, and one token when asked for one",
        _introduced,
    ),
    Check("models", "each engine's model is served on the other side too", _models),
    Check("context-length", "engines of one model have one max_model_len", _context_length),
    Check("engine-version", "engines of one family run one version", _versions),
    Check("prefix-caching", "vLLM engines cache prefixes", _prefix_caching),
)
