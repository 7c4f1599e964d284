"""The interface of routing policies. They do no I/O and know no asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from kvrouter.engines.compatibility import partners
from kvrouter.routing.plan import Plan, RouteInputs, Why, computed_tokens, cut_off, missing_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.engines.engine import Engine


class Policy(Protocol):
    """Chooses the engines of both legs, among the candidates of the inputs.

    One instance serves one router, in one thread.
    """

    name: ClassVar[str]
    """Value of `--policy`."""
    summary: ClassVar[str]
    """Which engine it chooses, for the help of `--policy`."""
    needs_hashes: ClassVar[bool]
    """Whether it uses `RouteInputs.matches`, `guesses` or `store_blocks`, which need token ids."""

    def plan(self, inputs: RouteInputs) -> Plan:
        """Decide. Never raises for valid inputs.

        One request may ask several times, with fewer candidates after a failure: an engine that is
        missing in `inputs` has not left the pool.
        """

    def rebind(
        self, inputs: RouteInputs, decode: Sequence[Engine], bound: Engine, own_tokens: int
    ) -> Engine:
        """Choose the decode engine again just before its leg: `bound`, unless another is better.

        Args:
            inputs: of the plan.
            decode: engines that can load the prompt's KV now.
            bound: the engine of the plan; it may not be among them.
            own_tokens: the load of the leg itself, which counts on `bound`.
        """


def in_turn(candidates: Sequence[Engine], turn: int) -> Sequence[Engine]:
    """The same engines, beginning with another one each turn, so that equals share the load."""
    first = turn % len(candidates)
    return [*candidates[first:], *candidates[:first]] if first else candidates


def connected(inputs: RouteInputs, price: Callable[[Engine], float]) -> Callable[[Engine], float]:
    """The price, and that of the whole prompt where it must be computed: the store node is away."""
    if not inputs.away:
        return price
    return lambda engine: price(engine) + inputs.prompt_tokens * cut_off(inputs, engine)


def rebound(
    decode: Sequence[Engine], bound: Engine, price: Callable[[Engine], float], own_tokens: int
) -> Engine:
    """The engine of the lowest price without the leg itself; among equals `bound`."""
    cheapest = min(decode, key=price)
    if bound in decode and price(bound) - own_tokens <= price(cheapest):
        return bound
    return cheapest


def decide(
    inputs: RouteInputs, decode: Engine, choose: Callable[[Sequence[Engine]], Engine]
) -> Plan:
    """What all policies share: whether there is a prefill leg, on which engine, and why.

    `choose` picks the prefill engine from a sequence that is not empty.
    """
    missing = missing_tokens(inputs, decode)

    def alone(why: Why) -> Plan:
        computed = computed_tokens(inputs, decode) if inputs.learnt else missing
        return Plan(None, decode, missing, why, computed)

    if decode.identity is None or decode.identity.can_serve_whole:
        if not inputs.split:
            return alone(Why.NOT_SPLITTABLE)
        if not missing or decode.computing_tokens + missing <= inputs.prefill_threshold:
            return alone(Why.LITTLE_MISSING)
    prefill: Sequence[Engine] = inputs.prefill
    if inputs.away:  # what is computed there reaches no other engine
        prefill = [engine for engine in prefill if not cut_off(inputs, engine)]
    able = partners(prefill, decode, inputs.model)
    if not able:
        return alone(_why_alone(prefill, decode))
    chosen = choose(able)
    return Plan(chosen, decode, missing, Why.PREFILL, computed_tokens(inputs, chosen))


def _why_alone(prefill: Sequence[Engine], decode: Engine) -> Why:
    if decode.pairs.keys() >= set(prefill):  # also if there is none
        return Why.NO_PREFILL_ENGINE
    identity = decode.identity
    if identity is not None and (identity.refusal is not None or not identity.can_split):
        return Why.SHARES_NO_KV
    if all(engine.family != decode.family for engine in prefill):
        return Why.FAMILIES_DIFFER
    if partners(prefill, decode):
        return Why.ADAPTERS_DIFFER
    return Why.SAME_ENGINE if decode in prefill else Why.MANIFESTS_DIFFER
