"""What a plan needs to know of a request: its tokens, its block hashes, and who holds them.

Asks only what the policy or the threshold can use; without an answer the request goes on.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final

from kvrouter.errors import bad_request
from kvrouter.plan import RouteInputs, usable_blocks
from kvstore.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvrouter.chains import Chains
    from kvrouter.engine import Engine, HashDomain, Identity
    from kvrouter.expected import Expected
    from kvrouter.kv_ledger import EventLedger
    from kvrouter.landing import StoreView
    from kvrouter.leg import Legs
    from kvrouter.passage import Passage
    from kvrouter.prefix_index import PrefixIndex
    from kvrouter.tokens import TokenSource

_NONE: Final[Mapping[Engine, int]] = {}
_NOTHING: Final[Mapping[str, int]] = {}


class Survey:
    """Gathers `RouteInputs`.

    Args:
        legs: knows each engine's family.
        tokens: finds token ids of texts and chats.
        chains: hashes prompts.
        index: what engines hold.
        expected: what they will hold when legs under way have ended.
        ledger: who tells of its own cache, or None where no events are taken.
        store: the store, or None.
        needs_hashes: whether the policy wants to know who holds what.
        prefill_threshold: see `RouteInputs`; may change.
    """

    def __init__(
        self,
        *,
        legs: Legs,
        tokens: TokenSource,
        chains: Chains,
        index: PrefixIndex,
        expected: Expected,
        ledger: EventLedger | None,
        store: StoreView | None,
        needs_hashes: bool,
        prefill_threshold: int,
        tell: Callable[[Engine, bytes], None] | None = None,
    ) -> None:
        self._legs = legs
        self._tokens = tokens
        self._chains = chains
        self._index = index
        self._expected = expected
        self._ledger = ledger
        self._store = store
        self._needs_hashes = needs_hashes
        self.prefill_threshold = prefill_threshold
        self._tell = tell
        self._turn = 0  # whose turn it is to tokenise

    async def inputs(
        self, passage: Passage, model: str, decode: Sequence[Engine], prefill: Sequence[Engine]
    ) -> RouteInputs:
        """All that the policy may look at; fills what `passage` knows of it.

        Raises:
            ApiError: 400: a parameter is not served by engines of this family.
        """
        request = passage.request
        assert request is not None
        engine = decode[0]
        family, identity = self._legs.family(engine), engine.identity
        refused = family.parameters.refused(request)
        if refused is not None:
            raise bad_request(f"`{refused}` is not served as it is given here.", refused)
        known = family.parameters.tokenizable(request)  # the prompt's tokens, before a leg
        if identity is not None and identity.domain is not None:
            passage.domain = identity.domain
            passage.adapter = identity.adapter(model)
            passage.hashable = family.hashable(request) and (known or request.ids is None)
        asks = self._needs_hashes and passage.hashable and request.ids is None and known
        if asks and passage.tokens is None:
            body = family.tokenize_body(request)
            self._turn += 1
            asked, since_s = decode[self._turn % len(decode)], monotonic()
            passage.tokens = await self._tokens.tokens(asked, model, body, request.text)
            passage.tokenised(since_s)
        if identity is not None and _too_long_a_chat(passage, identity):
            passage.tokens = None
        ids = request.ids
        if passage.tokens is not None:
            ids = passage.tokens.ids
            request.prompt_tokens = len(passage.tokens)
        matches, guesses = _NONE, _NONE
        if self._needs_hashes and passage.hashable and ids is not None:
            hashes = passage.hashes = hash_prompt(self._chains, passage, ids)
            matches, guesses = self._told(self._index.match(hashes))
            passage.stored = await self._stored(passage, hashes, decode, matches)
            guesses = self._guesses(hashes, matches, guesses)
        return RouteInputs(
            prompt_tokens=request.prompt_tokens,
            decode=decode,
            prefill=prefill,
            exact=ids is not None,
            block_tokens=passage.domain.block_tokens if passage.domain is not None else 0,
            hashes=passage.hashes,
            matches=matches,
            guesses=guesses,
            store_blocks=passage.stored or _NOTHING,
            prefill_threshold=self.prefill_threshold,
            split=family.single_leg(request) is None,
            model=model,
        )

    def _told(
        self, found: Mapping[Engine, int]
    ) -> tuple[Mapping[Engine, int], Mapping[Engine, int]]:
        """What engines hold for certain, by their events, apart from what is only believed."""
        ledger = self._ledger
        if ledger is None or not found:
            return _NONE, found
        guesses = {e: blocks for e, blocks in found.items() if not ledger.trusts(e)}
        if not guesses:
            return found, _NONE
        return {e: blocks for e, blocks in found.items() if e not in guesses}, guesses

    def _guesses(
        self, hashes: bytes, matches: Mapping[Engine, int], guesses: Mapping[Engine, int]
    ) -> Mapping[Engine, int]:
        """What engines are believed to hold, or will when their legs have ended, beyond matches."""
        coming = self._expected.match(hashes)
        if not coming:
            return guesses
        more = {e: n for e, n in coming.items() if n > max(matches.get(e, 0), guesses.get(e, 0))}
        return {**guesses, **more} if more else guesses

    def computed(self, engine: Engine, hashes: bytes | None) -> None:
        """`engine` has these blocks now: believed where it does not tell by events itself."""
        if not hashes or not self._needs_hashes or engine.identity is None:
            return  # (without an identity it left meanwhile, and what it held is gone)
        if self._ledger is None:
            self._index.credit(engine, hashes)
        elif not self._ledger.computed(engine, hashes):
            return
        if self._tell is not None:
            self._tell(engine, hashes)

    async def _stored(
        self,
        passage: Passage,
        hashes: bytes,
        decode: Sequence[Engine],
        matches: Mapping[Engine, int],
    ) -> Mapping[str, int]:
        """What the store holds, per manifest; not asked where an engine holds all itself."""
        request, domain = passage.request, passage.domain
        if self._store is None or request is None or domain is None:
            return _NOTHING
        usable = usable_blocks(request.prompt_tokens, domain.block_tokens)
        if not usable or (matches and max(matches.get(e, 0) for e in decode) >= usable):
            return _NOTHING
        wanted = hashes[: usable * HASH_BYTES]
        manifests = {e.manifest for e in decode if e.manifest is not None}
        return {m: await self._store.match(m, wanted) for m in manifests}


def _too_long_a_chat(passage: Passage, identity: Identity) -> bool:
    """Whether an engine will refuse a chat for its length: it is to read the messages for that.

    Token ids beside the messages vLLM counts too late: its error then has other words, no `param`.
    """
    request, tokens, most = passage.request, passage.tokens, identity.max_model_len
    if request is None or request.kind != "chat" or tokens is None or most is None:
        return False
    return len(tokens) > most


def hash_prompt(
    chains: Chains, passage: Passage, ids: bytes, told: HashDomain | None = None
) -> bytes:
    """The chain of block hashes of a prompt, 32 bytes per whole block.

    Args:
        chains: hashes it.
        passage: knows salt, adapter and hash domain.
        ids: the prompt's token ids as native uint32.
        told: the domain, where an engine's answer told another one than its introduction.
    """
    domain = told or passage.domain
    if domain is None or passage.request is None:
        return b""
    return chains.hashes(ids, domain, passage.adapter, passage.request.cache_salt)
