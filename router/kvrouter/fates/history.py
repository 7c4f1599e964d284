"""Which prompts earlier requests had, in bounded memory: whether a token is needed the first time.

Chains of hashes go into a sketch. It knows the last 12 million different blocks at least, 200
million tokens in blocks of 16, and calls at most one in 200 new ones seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvrouter._native import SeenBlocks
from kvrouter.prefix.learnt import learnt_names, tokens_of_pieces
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.engines.engine import HashDomain
    from kvrouter.openai.request import Request
    from kvrouter.prefix.hash_cache import HashCache
    from kvrouter.prefix.stores.base import Origin

MAX_BYTES: Final = 48 << 20
_WORD: Final = (1 << 64) - 1


class Past(NamedTuple):
    """Leading tokens of a prompt that earlier requests had: as it is, or with another identity."""

    seen: int = 0
    akin: int = 0  # with another salt, adapter, or version of the alias


NEVER: Final = Past()


class NamedPrompt(Protocol):
    """What of a prompt is known by name."""

    domain: HashDomain | None
    hashes: bytes | None
    origin: Origin | None
    learnt: bytes | None


@dataclass(eq=False, slots=True)
class History:
    """The prompts that were planned so far. One thread."""

    hash_cache: HashCache  # names what has no names yet
    _seen: SeenBlocks = field(default_factory=lambda: SeenBlocks(MAX_BYTES), init=False)
    _secret: int = field(default_factory=lambda: randbits(64), init=False)

    def add(self, request: Request, prompt: NamedPrompt, base: str, alias: str | None) -> Past:
        """Note a prompt that is planned for a model `base`; tell what was noted before.

        `alias` is the name by which the model was asked for, if it has more versions.
        """
        origin, domain, names = prompt.origin, prompt.domain, prompt.learnt
        if prompt.hashes is not None and origin is not None and domain is not None:
            size = domain.block_tokens
            seen = akin = self._look(prompt.hashes, base) * size
            if origin.cache_salt is not None or origin.adapter is not None or alias is not None:
                plain = self.hash_cache.hashes(origin.ids, domain)
                akin = self._look(plain, alias or base) * size
            return Past(seen, akin)
        seen = akin = self._pieces(request, names, base)
        if request.cache_salt is not None:
            akin = self._pieces(replace(request, cache_salt=None), None, base)
        return Past(seen, akin)

    def _pieces(self, request: Request, names: bytes | None, base: str) -> int:
        """The same of a prompt without block hashes, by the pieces of what its client wrote."""
        names = learnt_names(self.hash_cache, request, base) if names is None else names
        pieces = self._look(names, base)
        if pieces * HASH_BYTES == len(names):
            return request.prompt_tokens if pieces else 0
        return pieces * tokens_of_pieces(names, request.prompt_tokens)

    def _look(self, names: bytes, whose: str) -> int:
        return self._seen.see(names, (self._secret ^ hash(whose)) & _WORD)
