"""What a plan is made of: a prompt's tokens, its block hashes, and which engines hold its KV.

Asks only for what the policy or the threshold can use; without an answer the request goes on.
"""

from __future__ import annotations

from asyncio import gather
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.errors import bad_request
from kvrouter.prefix.learnt import PIECE_TOKENS, LearntPrefixes
from kvrouter.prefix.lower import NOTHING, Held
from kvrouter.prefix.stores.base import Origin
from kvrouter.routing.plan import Plan, RouteInputs, chosen_by, usable_blocks
from kvrouter.serving.request.trace_attributes import note_plan_span
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.engines.engine import Engine, HashDomain, Identity
    from kvrouter.engines.families import Families
    from kvrouter.engines.families.base import Family
    from kvrouter.fates.history import History
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.in_flight import InFlightPrefixes
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.prefix.stores.base import StoreMatch, StoreView
    from kvrouter.prefix.tokenize import TokenSource
    from kvrouter.serving.request.context import PromptFacts, RequestContext
    from kvrouter.serving.request.limits import ServingLimits
    from kvrouter.telemetry.metrics import Metrics

_NO_MANIFEST: Final[Mapping[str, StoreMatch]] = {}


@dataclass(eq=False, slots=True, kw_only=True)
class InputsBuilder:
    """Gathers `RouteInputs`, and notes what engines have computed."""

    domain: Callable[[str], HashDomain | None]  # in which prompts of a model are hashed
    families: Families  # say which parameters engines take
    tokens: TokenSource  # finds token ids of texts and chats
    hash_cache: HashCache
    index: PrefixIndex  # what engines hold
    in_flight: InFlightPrefixes  # what engines will hold when the legs that run now have ended
    tracker: CacheTracker | None  # follows engines' KV events; None: no events are taken
    store: StoreView | None  # the store, or None
    needs_hashes: bool  # whether the policy uses what engines and store hold
    learnt: LearntPrefixes  # tells what is guessed of a prompt whose block hashes are unknown
    history: History  # knows what earlier prompts had in common with this one
    limits: ServingLimits
    publish: Callable[[Engine, bytes], None] | None  # to other routers; None: there are none

    async def inputs(
        self, context: RequestContext, decode: Sequence[Engine], prefill: Sequence[Engine]
    ) -> RouteInputs:
        """All that the policy may look at; fills `context.prompt`.

        Raises:
            ApiError: 400: engines of this family do not support a parameter.
        """
        request, prompt = context.request, context.prompt
        prompt.domain = self.domain(context.model)
        first = _of_domain(prompt.domain, decode)
        family = self.families.of(first)
        refused = family.parameters.refused(request)
        if refused is not None:
            raise bad_request(f"The router does not support this value of `{refused}`.", refused)
        ids = await self._find_ids(context, family, first.identity, decode)
        domain, held, session = prompt.domain, Held(), None
        learnt, block_tokens = False, domain.block_tokens if domain is not None else 0
        if self.needs_hashes and prompt.hashable and domain is not None and ids is not None:
            hashes = prompt.hashes = hash_prompt(self.hash_cache, context, ids, domain)
            held = self._held(prompt, hashes)
            usable = usable_blocks(request.prompt_tokens, domain.block_tokens)
            if not held.own or max(held.own.get(engine, 0) for engine in decode) < usable:
                await self._match_store(prompt, usable, decode)
        elif self.needs_hashes and (len(decode) > 1 or len(prefill) > 1):
            found = self.learnt.look(request, context.exchange.headers, context.model)
            learnt, held = True, Held(guesses=found.guesses)
            prompt.learnt, block_tokens, _, session = found
        base = first.identity.models[0] if first.identity is not None else context.model
        prompt.past = self.history.add(request, prompt, base, context.alias)
        return RouteInputs(
            prompt_tokens=request.prompt_tokens,
            decode=decode,
            prefill=prefill,
            exact=ids is not None,
            block_tokens=block_tokens,
            matches=held.own,
            lower=held.lower,
            guesses=held.guesses,
            learnt=learnt,
            session=session,
            store_blocks={m: found.blocks for m, found in (prompt.stored or _NO_MANIFEST).items()},
            prefill_threshold=self._threshold(context),
            away=self.store.out_of_reach if self.store is not None else (),
            split=family.unsplittable(request) is None,
            model=context.model,
        )

    def _threshold(self, context: RequestContext) -> int:
        """Of the alias, else of the model, else the fleet's."""
        own, usual = self.limits.model_thresholds, self.limits.prefill_threshold
        return own.get(context.alias or "", own.get(context.model, usual)) if own else usual

    async def _find_ids(
        self,
        context: RequestContext,
        family: Family,
        identity: Identity | None,
        decode: Sequence[Engine],
    ) -> bytes | None:
        """Token ids of the prompt, if they are known or can be found; fills `context.prompt`."""
        request, prompt = context.request, context.prompt
        # Whether the prompt's tokens are known before a leg, or could be.
        known = prompt.tokens is not None or family.parameters.tokenizable(request)
        if identity is not None and prompt.domain is not None:
            prompt.adapter = identity.adapter(context.model)
            prompt.hashable = family.hashable(request) and (known or request.ids is None)
        if request.ids is not None:
            return request.ids
        if self.needs_hashes and prompt.hashable and known and prompt.tokens is None:
            body = family.tokenize_body(request)
            since_s = monotonic()
            prompt.tokens = await self.tokens.tokens(
                decode, context.model, body, request.text, request.cache_salt
            )
            context.tokenised(since_s)
        if identity is not None and _is_too_long_a_chat(context, identity):
            prompt.tokens = None
        if prompt.tokens is None:
            return None
        request.prompt_tokens = len(prompt.tokens)
        return prompt.tokens.ids

    def _held(self, prompt: PromptFacts, hashes: bytes) -> Held:
        """What engines hold by their events, and what they probably hold, now or soon."""
        tracker = self.tracker
        held = tracker.held(hashes) if tracker else Held(guesses=self.index.match(hashes))
        own, known, soon = held.own, held.guesses, self.in_flight.match(hashes)
        prompt.coming_blocks = max(soon.values(), default=0)
        more = {e: n for e, n in soon.items() if n > max(own.get(e, 0), known.get(e, 0))}
        return held._replace(guesses={**known, **more}) if more else held

    async def _match_store(self, prompt: PromptFacts, upto: int, decode: Sequence[Engine]) -> None:
        """Note what the store holds of the first blocks, by manifest of the engines."""
        chain = (prompt.hashes or b"")[: upto * HASH_BYTES]
        if self.store is not None and chain:
            manifests = {e.manifest for e in decode if e.manifest is not None}
            asked = [self.store.match(m, chain, prompt.origin) for m in manifests]
            found = await gather(*asked) if len(asked) > 1 else [await each for each in asked]
            prompt.stored = dict(zip(manifests, found, strict=True))

    def computed(self, engine: Engine, prompt: PromptFacts) -> None:
        """`engine` has a prompt now: a guess, if it does not report its blocks by events itself."""
        if not self.needs_hashes or engine.identity is None:
            return  # (without an identity it left meanwhile, and what it held is gone)
        block_tokens = prompt.domain.block_tokens if prompt.domain is not None else PIECE_TOKENS
        for chain in filter(None, (prompt.hashes, prompt.learnt)):
            if chain is prompt.learnt:
                self.index.guess(engine, chain, PIECE_TOKENS)
            elif self.tracker is None:
                self.index.guess(engine, chain, block_tokens)
            elif not self.tracker.computed(engine, chain, block_tokens):
                continue
            if self.publish is not None:
                self.publish(engine, chain)


def _of_domain(domain: HashDomain | None, engines: Sequence[Engine]) -> Engine:
    """The first engine that names blocks so, or else the first."""
    same = (e for e in engines if e.identity is not None and e.identity.domain == domain)
    return next(same, engines[0])


def _is_too_long_a_chat(context: RequestContext, identity: Identity) -> bool:
    """Whether an engine will refuse a chat for its length, and must read the messages for that.

    vLLM counts token ids beside the messages too late: its error then has other words, no `param`.
    """
    tokens, most = context.prompt.tokens, identity.max_model_len
    if context.request.kind != "chat" or tokens is None or most is None:
        return False
    return len(tokens) > most


def hash_prompt(
    hash_cache: HashCache, context: RequestContext, ids: bytes, domain: HashDomain
) -> bytes:
    """The chain of block hashes of a prompt, 32 bytes per whole block. Notes their origin.

    Args:
        hash_cache: hashes it.
        context: knows salt and adapter.
        ids: the prompt's token ids as native uint32.
        domain: what the hashes are to mean.
    """
    adapter, salt = context.prompt.adapter, context.request.cache_salt
    context.prompt.origin = Origin(ids, domain.block_tokens, salt, adapter)
    return hash_cache.hashes(ids, domain, adapter, salt)


def note_plan(context: RequestContext, plan: Plan, inputs: RouteInputs, metrics: Metrics) -> None:
    """Count the plan of a prompt, and the prompt's tokens by where their KV was."""
    engine, lower, store = hits(inputs, plan.decode)
    model = metrics.of(context.model)
    context.route.note_hits(inputs, engine, lower, store)
    metrics.overhead.observe(context.timing.planned_s - context.timing.started_s)
    metrics.plans[plan.why] += 1
    metrics.chosen[chosen_by(inputs, plan.decode)] += 1
    model.prompt_tokens += inputs.prompt_tokens
    model.hit_engine += engine
    model.hit_lower += lower
    model.hit_store += store
    if context.trace is not None:
        note_plan_span(context, plan, context.trace)


def hits(inputs: RouteInputs, decode: Engine) -> tuple[int, int, int]:
    """Leading tokens that `decode` has cached, then those in its lower tiers, then in the store."""
    own, size = inputs.matches.get(decode, 0), inputs.block_tokens
    reach = max(own, inputs.lower.get(decode, NOTHING).blocks)
    stored = inputs.store_blocks.get(decode.manifest or "", 0)
    return own * size, (reach - own) * size, max(stored - reach, 0) * size
