"""The engine that would be done first: tokens in flight plus tokens to compute or to load.

A cost, not a threshold: an engine that holds the prefix wins only while its queue is shorter than
what computing the rest elsewhere takes, so a popular prefix cannot make a hot spot.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.prefix.lower import NOTHING
from kvrouter.routing.plan import Plan, RouteInputs, usable_blocks
from kvrouter.routing.policies.base import connected, decide, in_turn, rebound
from kvrouter.routing.rendezvous import by_affinity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.engines.engine import Engine

LOAD_COST = 0.05
"""Cost of loading one token's KV from the store, in computed tokens (1/20 where measured)."""
DECODE_COST = 0.1
"""What each token of requests that an engine decodes adds to computing beside them: an estimate."""
_TOKENS: Final = attrgetter("tokens")


class Prefix:
    """Least cost in tokens to be computed; equals take turns."""

    name: ClassVar[str] = "prefix"
    summary: ClassVar[str] = "also by the blocks that each engine and the store already hold"
    needs_hashes: ClassVar[bool] = True

    def __init__(self) -> None:
        self._turn = 0

    def plan(self, inputs: RouteInputs) -> Plan:
        """The cheapest engine of each role; the session's, where nobody holds any of the prompt."""
        cheapest = self.choice(inputs)
        return decide(inputs, cheapest(inputs.decode), cheapest)

    def choice(self, inputs: RouteInputs) -> Callable[[Sequence[Engine]], Engine]:
        """What picks the cheapest of some engines for this prompt."""
        self._turn += 1
        price = connected(inputs, pricing(inputs))

        def cheapest(candidates: Sequence[Engine]) -> Engine:
            if len(candidates) == 1:
                return candidates[0]
            if inputs.learnt:
                return by_affinity(inputs, in_turn(candidates, self._turn), price)
            return min(in_turn(candidates, self._turn), key=price)

        return cheapest

    def rebind(
        self, inputs: RouteInputs, decode: Sequence[Engine], bound: Engine, own_tokens: int
    ) -> Engine:
        """The cheapest, since it need not load what it holds; among equals the bound one."""
        held, saved = inputs.matches, LOAD_COST * inputs.block_tokens

        def price(engine: Engine) -> float:
            return engine.tokens - saved * held.get(engine, 0)

        return rebound(decode, bound, connected(inputs, price if held else _TOKENS), own_tokens)


def pricing(inputs: RouteInputs) -> Callable[[Engine], float]:
    """The cost of this prompt on an engine, up to a constant of the request.

    In tokens to compute until it is prefilled: those in flight, less those that the engine holds;
    those that it would load from the store cost LOAD_COST each, those of its lower tiers their own.
    """
    block_tokens, stored, lower = inputs.block_tokens, inputs.store_blocks, inputs.lower
    load = _TOKENS if inputs.prefill and inputs.split else _computing
    held = believed(inputs)
    usable = usable_blocks(inputs.prompt_tokens, block_tokens)
    if not usable or not (held or stored or lower):
        return load

    def price(engine: Engine) -> float:
        loads = lower.get(engine, NOTHING)
        own = max(min(held.get(engine, 0), usable), min(loads.blocks, usable) - loads.cost)
        identity = engine.identity
        manifest = identity.manifest if identity else None
        loadable = min(stored.get(manifest, 0), usable) - own if manifest else 0
        blocks = own + (1 - LOAD_COST) * loadable if loadable > 0 else own
        return load(engine) - blocks * block_tokens

    return price


def _computing(engine: Engine) -> float:
    """The load of an engine that computes prompts itself: most of their tokens may be cached."""
    unknown = engine.remote_tokens  # of other routers: any of them may be to be computed
    return engine.computing_tokens + unknown + DECODE_COST * (engine.tokens - unknown)


def believed(inputs: RouteInputs) -> Mapping[Engine, int]:
    """Leading blocks that engines hold, by events or by guesses, whichever is more."""
    if not inputs.guesses:
        return inputs.matches
    held = dict(inputs.matches)
    for engine, blocks in inputs.guesses.items():
        held[engine] = max(blocks, held.get(engine, 0))
    return held
