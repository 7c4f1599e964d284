"""What a plan needs to know of a request: its tokens, its block hashes, and who holds them.

Asks only what the policy or the threshold can use; without an answer the request goes on.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.errors import bad_request
from kvrouter.routing.plan import RouteInputs, usable_blocks
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.engines.engine import Engine, HashDomain, Identity
    from kvrouter.engines.families import Families
    from kvrouter.openai.request import Request
    from kvrouter.prefix.events.tracker import CacheTracker
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.in_flight import InFlightPrefixes
    from kvrouter.prefix.index import PrefixIndex
    from kvrouter.prefix.store_view import StoreView
    from kvrouter.prefix.tokenize import TokenSource
    from kvrouter.serving.request.context import RequestContext

_NONE: Final[Mapping[Engine, int]] = {}
_NOTHING: Final[Mapping[str, int]] = {}


class InputsBuilder:
    """Gathers `RouteInputs`.

    Args:
        families: say what engines take.
        tokens: finds token ids of texts and chats.
        chains: hashes prompts.
        index: what engines hold.
        expected: what they will hold when legs under way have ended.
        tracker: who tells of its own cache, or None where no events are taken.
        store: the store, or None.
        needs_hashes: whether the policy wants to know who holds what.
        prefill_threshold: see `RouteInputs`; may change.
    """

    def __init__(
        self,
        *,
        families: Families,
        tokens: TokenSource,
        chains: HashCache,
        index: PrefixIndex,
        expected: InFlightPrefixes,
        tracker: CacheTracker | None,
        store: StoreView | None,
        needs_hashes: bool,
        prefill_threshold: int,
        tell: Callable[[Engine, bytes], None] | None = None,
    ) -> None:
        self._families = families
        self._tokens = tokens
        self._chains = chains
        self._index = index
        self._expected = expected
        self._tracker = tracker
        self._store = store
        self._needs_hashes = needs_hashes
        self.prefill_threshold = prefill_threshold
        self._tell = tell
        self._turn = 0  # whose turn it is to tokenise

    async def inputs(
        self,
        context: RequestContext,
        model: str,
        decode: Sequence[Engine],
        prefill: Sequence[Engine],
    ) -> RouteInputs:
        """All that the policy may look at; fills what `context` knows of it.

        Raises:
            ApiError: 400: a parameter is not served by engines of this family.
        """
        request, prompt, family = context.request, context.prompt, self._families.of(decode[0])
        assert request is not None
        refused = family.parameters.refused(request)
        if refused is not None:
            raise bad_request(f"`{refused}` is not served as it is given here.", refused)
        ids = await self._ids(context, request, model, decode)
        matches, guesses = _NONE, _NONE
        if self._needs_hashes and prompt.hashable and ids is not None:
            hashes = prompt.hashes = hash_prompt(self._chains, context, ids)
            matches, guesses = self._told(self._index.match(hashes))
            prompt.stored = await self._stored(context, hashes, decode, matches)
            guesses = self._guesses(hashes, matches, guesses)
        return RouteInputs(
            prompt_tokens=request.prompt_tokens,
            decode=decode,
            prefill=prefill,
            exact=ids is not None,
            block_tokens=prompt.domain.block_tokens if prompt.domain is not None else 0,
            matches=matches,
            guesses=guesses,
            store_blocks=prompt.stored or _NOTHING,
            prefill_threshold=self.prefill_threshold,
            split=family.unsplittable(request) is None,
            model=model,
        )

    async def _ids(
        self, context: RequestContext, request: Request, model: str, decode: Sequence[Engine]
    ) -> bytes | None:
        """Token ids of the prompt, where they are known or can be found; fills `context.prompt`."""
        prompt, identity = context.prompt, decode[0].identity
        family = self._families.of(decode[0])
        known = family.parameters.tokenizable(request)  # the prompt's tokens, before a leg
        if identity is not None and identity.domain is not None:
            prompt.domain = identity.domain
            prompt.adapter = identity.adapter(model)
            prompt.hashable = family.hashable(request) and (known or request.ids is None)
        asks = self._needs_hashes and prompt.hashable and request.ids is None and known
        if asks and prompt.tokens is None:
            body = family.tokenize_body(request)
            self._turn += 1
            asked, since_s = decode[self._turn % len(decode)], monotonic()
            prompt.tokens = await self._tokens.tokens(asked, model, body, request.text)
            context.tokenised(since_s)
        if identity is not None and _too_long_a_chat(context, identity):
            prompt.tokens = None
        if prompt.tokens is None:
            return request.ids
        request.prompt_tokens = len(prompt.tokens)
        return prompt.tokens.ids

    def _told(
        self, found: Mapping[Engine, int]
    ) -> tuple[Mapping[Engine, int], Mapping[Engine, int]]:
        """What engines hold for certain, by their events, apart from what is only believed."""
        tracker = self._tracker
        if tracker is None or not found:
            return _NONE, found
        guesses = {e: blocks for e, blocks in found.items() if not tracker.trusts(e)}
        if not guesses:
            return found, _NONE
        return {e: blocks for e, blocks in found.items() if e not in guesses}, guesses

    def _guesses(
        self, hashes: bytes, matches: Mapping[Engine, int], guesses: Mapping[Engine, int]
    ) -> Mapping[Engine, int]:
        """What engines are believed to hold, or will when their legs have ended, beyond matches."""
        pending = self._expected.match(hashes)
        if not pending:
            return guesses
        more = {e: n for e, n in pending.items() if n > max(matches.get(e, 0), guesses.get(e, 0))}
        return {**guesses, **more} if more else guesses

    def computed(self, engine: Engine, hashes: bytes | None) -> None:
        """`engine` has these blocks now: believed where it does not tell by events itself."""
        if not hashes or not self._needs_hashes or engine.identity is None:
            return  # (without an identity it left meanwhile, and what it held is gone)
        if self._tracker is None:
            self._index.credit(engine, hashes)
        elif not self._tracker.computed(engine, hashes):
            return
        if self._tell is not None:
            self._tell(engine, hashes)

    async def _stored(
        self,
        context: RequestContext,
        hashes: bytes,
        decode: Sequence[Engine],
        matches: Mapping[Engine, int],
    ) -> Mapping[str, int]:
        """What the store holds, per manifest; not asked where an engine holds all itself."""
        request, domain = context.request, context.prompt.domain
        if self._store is None or request is None or domain is None:
            return _NOTHING
        usable = usable_blocks(request.prompt_tokens, domain.block_tokens)
        if not usable or (matches and max(matches.get(e, 0) for e in decode) >= usable):
            return _NOTHING
        wanted = hashes[: usable * HASH_BYTES]
        manifests = {e.manifest for e in decode if e.manifest is not None}
        return {m: await self._store.match(m, wanted) for m in manifests}


def _too_long_a_chat(context: RequestContext, identity: Identity) -> bool:
    """Whether an engine will refuse a chat for its length: it is to read the messages for that.

    Token ids beside the messages vLLM counts too late: its error then has other words, no `param`.
    """
    request, tokens, most = context.request, context.prompt.tokens, identity.max_model_len
    if request is None or request.kind != "chat" or tokens is None or most is None:
        return False
    return len(tokens) > most


def hash_prompt(
    chains: HashCache, context: RequestContext, ids: bytes, told: HashDomain | None = None
) -> bytes:
    """The chain of block hashes of a prompt, 32 bytes per whole block.

    Args:
        chains: hashes it.
        context: knows salt, adapter and hash domain.
        ids: the prompt's token ids as native uint32.
        told: the domain, where an engine's answer told another one than its introduction.
    """
    domain = told or context.prompt.domain
    if domain is None or context.request is None:
        return b""
    return chains.hashes(ids, domain, context.prompt.adapter, context.request.cache_salt)
