"""What is known of a prompt's tokens when its request has ended: what was promised, what came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families.base import NothingLanded
from kvrouter.fates.fate import Fate
from kvrouter.fates.split import Evidence
from kvrouter.prefix.lower import NOTHING
from kvrouter.routing.plan import Why
from kvrouter.serving.request.summary import usage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.prefix.stores.base import StoreView
    from kvrouter.routing.plan import Plan, RouteInputs
    from kvrouter.serving.request.context import RequestContext

_LATE: Final[Mapping[str, Fate]] = {
    NothingLanded.TIMEOUT: Fate.LANDED_LATE,
    NothingLanded.EVICTED: Fate.EVICTED_STORE,
    NothingLanded.STORE_AWAY: Fate.STORE_AWAY,
    NothingLanded.ENGINE_STORE_AWAY: Fate.STORE_AWAY,
    NothingLanded.UNKNOWN_MANIFEST: Fate.OTHER_MANIFEST,
    NothingLanded.UNKNOWN_TOKENS: Fate.NOT_SHARED,
    NothingLanded.NOT_SHARED: Fate.NOT_SHARED,
    NothingLanded.NO_TAIL: Fate.NOT_SHARED,
}
_DIFFERENCES: Final = {
    "weights_revision": Fate.OTHER_WEIGHTS,
    "block_tokens": Fate.OTHER_BLOCK_SIZE,
    "hash_algo": Fate.OTHER_HASH,
    "root": Fate.OTHER_HASH,
}
MOST_ENGINES: Final = 4096


@dataclass(eq=False, slots=True, kw_only=True)
class Witness:
    """Gathers the evidence of requests."""

    store: StoreView | None
    looks: bool  # whether the policy looks at what engines hold
    difference: Callable[[str, str], str]  # how two manifests differ, in words
    _tell: set[str] = field(default_factory=set, init=False)
    """Engines that told cached tokens, at most MOST_ENGINES. vLLM leaves out that there are 0."""

    def evidence(self, unit: RequestContext) -> Evidence | None:
        """Of one prompt; None: its answer has not begun, or nobody counted its tokens."""
        route, prompt, outcome, tokens = (
            unit.route,
            unit.prompt,
            unit.outcome,
            usage_of(unit).prompt,
        )
        plan, inputs = route.plan, route.inputs
        if not tokens:
            return None
        if plan is None or inputs is None:  # one engine answered it whole
            cached = outcome.cached_tokens
            return Evidence(prompt=tokens, cached=cached, seen=tokens, gone=Fate.NOT_SHARED)
        handoff = route.handoff if plan.prefill is not None else None
        engine = plan.decode if plan.prefill is None or handoff is None else plan.prefill
        size, match, own = inputs.block_tokens, prompt.stored_for(engine.manifest), inputs.matches
        known = Evidence(
            prompt=tokens,
            by_prefill=handoff is not None,
            block=prompt.domain.block_tokens if prompt.domain is not None else size,
            own=(own[engine] if engine in own else inputs.guesses.get(engine, 0)) * size,
            sure=engine in own,
            lower=inputs.lower.get(engine, NOTHING).blocks * size,
            node=match.at(engine.node) * size,
            store=match.blocks * size,
            coming=2 * prompt.coming_blocks * size,
            seen=prompt.past.seen,
            akin=prompt.past.akin,
        )
        if unit.request.cache_salt is not None:
            known.identity = Fate.OTHER_SALT
        elif prompt.adapter is not None:
            known.identity = Fate.OTHER_ADAPTER
        decoded = None
        if outcome.prompt_tokens is not None:
            decoded = self._told(plan.decode.address, outcome.cached_tokens)
        if handoff is None:
            known.cached = decoded
        else:
            told = handoff.cached_tokens or handoff.reused_tokens
            known.cached, known.held = self._told(engine.address, told), handoff.held_tokens
            if handoff.manifest is not None or route.nothing_landed is not None:
                self._note_loaded(known, unit, plan, decoded)
        if known.seen > (known.store if known.cached is None else known.cached):
            known.elsewhere = _elsewhere(inputs, engine, prompt.coming_blocks) * size
            known.barred = self._bar(unit, plan, inputs, engine)
            known.gone = self._gone(inputs, engine)
        return known

    def _told(self, engine: str, told: int | None) -> int | None:
        """Cached tokens by its usage; None: it does not tell them."""
        if told is None:
            return 0 if engine in self._tell else None
        if len(self._tell) < MOST_ENGINES:
            self._tell.add(engine)
        return told

    def _note_loaded(
        self, known: Evidence, unit: RequestContext, plan: Plan, decoded: int | None
    ) -> None:
        """What decode had of the prompt after the prefill leg, and why not more."""
        route, handoff = unit.route, unit.route.handoff
        assert handoff is not None
        landed = (route.landed_blocks or 0) * (handoff.block_tokens or known.block)
        held = max(route.hit_engine + route.hit_lower, landed)
        known.loaded = held if decoded is None else decoded
        manifest, other = handoff.manifest, plan.decode.manifest
        if self._away(plan.decode):
            known.late = Fate.STORE_AWAY
        elif route.nothing_landed is not None:
            known.late = _LATE.get(route.nothing_landed, Fate.LOAD_FAILED)
        elif manifest is not None and other is not None and manifest != other:
            known.late = self._differing(manifest, other)
        elif landed + known.block < known.prompt:
            known.late = Fate.LANDED_LATE

    def _bar(
        self, unit: RequestContext, plan: Plan, inputs: RouteInputs, engine: Engine
    ) -> Fate | None:
        """Why `engine` could not use what others had; None: it could."""
        counted, mine = unit.outcome.prompt_tokens, engine.manifest or ""
        if inputs.exact and counted not in (None, inputs.prompt_tokens):
            return Fate.OTHER_TOKENS
        if plan.why is Why.NOT_SPLITTABLE:
            return Fate.NOT_SHARED
        stored = unit.prompt.stored or {}
        most = max(stored, key=lambda manifest: stored[manifest].blocks, default=mine)
        if stored and stored[most].blocks > unit.prompt.stored_for(mine).blocks:
            return self._differing(most, mine)
        return self._odd(inputs, engine)

    def _odd(self, inputs: RouteInputs, engine: Engine) -> Fate | None:
        """How `engine` differs from most of the model's engines; None: it does not."""
        others = {*inputs.decode, *inputs.prefill} - {engine}
        unlike = [each for each in others if _kind(each) != _kind(engine)]
        if not unlike or 2 * len(unlike) <= len(others):
            return None
        (mine, manifest), (theirs, other) = _kind(engine), _kind(unlike[0])
        if mine and theirs and mine != theirs:
            sizes = mine.block_tokens, theirs.block_tokens
            return Fate.OTHER_HASH if sizes[0] == sizes[1] else Fate.OTHER_BLOCK_SIZE
        return self._differing(other or "", manifest or "")

    def _differing(self, one: str, other: str) -> Fate:
        words = self.difference(one, other)
        found = (fate for name, fate in _DIFFERENCES.items() if name in words)
        return next(found, Fate.OTHER_MANIFEST)

    def _gone(self, inputs: RouteInputs, engine: Engine) -> Fate:
        """Why nobody has what an earlier request had."""
        if self.store is not None and engine.manifest is not None:
            return Fate.STORE_AWAY if self._away(engine) else Fate.EVICTED_STORE
        if not self.looks and len(inputs.decode) > 1:
            return Fate.NOT_LOOKED
        return Fate.EVICTED_ENGINE

    def _away(self, engine: Engine) -> bool:
        """Whether the node of the store that `engine` uses is not connected now."""
        away = self.store.away if self.store is not None else ()
        return bool(away) and (engine.node in away or not (self.store and self.store.nodes))


def _kind(engine: Engine) -> tuple[HashDomain | None, str | None]:
    return engine.identity.domain if engine.identity is not None else None, engine.manifest


def _elsewhere(inputs: RouteInputs, engine: Engine, coming: int) -> int:
    """Leading blocks that another engine holds, or probably holds; not those in flight there."""
    lower = {other: each.blocks for other, each in inputs.lower.items()}
    guesses = {other: blocks for other, blocks in inputs.guesses.items() if blocks > coming}
    held = (*inputs.matches.items(), *lower.items(), *guesses.items())
    return max((blocks for other, blocks in held if other is not engine), default=0)
