"""Callers with their keys: who is meant by a header, what they may use, what they have used.

Synchronous, over an injected clock. A caller outlives a change of the keys as long as its name
does, with the requests it has under way and what it has used of its rates.
"""

from __future__ import annotations

import time
from collections import Counter
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, Final

from kvrouter.access.token_bucket import Bucket
from kvrouter.errors import ApiError, model_not_found
from kvrouter_store.connection.tokens import bearer_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.credentials.caller_keys import Key
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.respond import HttpRequest

_LIMITED: Final = "rate_limit_exceeded"
_MAX_AUTHORIZATION: Final = 2048
"""Characters of a header that are looked at; a longer one is nobody's."""


def caller_of(asked: Exchange | HttpRequest) -> Caller | None:
    """The caller that the gate found; None where the router asks for no key."""
    found = asked.principal
    return found if isinstance(found, Caller) else None


class Caller:
    """One name of the file of keys, and what it has under way.

    Attributes:
        name: as in log, metrics and the fair queue.
        limited: whether `begin` may refuse.
        metered: whether `admit` may refuse, and what is used must be told to `charge`.
        requests: how many have begun; only grows.
        ended: how many of these are over; only grows.
        tokens: tokens used, of prompts and answers; only grows.
        refused: how many were refused, by the reason; only grows.

    Whoever lets a request begin or end, or uses tokens, counts them here.
    """

    __slots__ = ("_clock", "_key", "_models", "_most", "_rate", "_token_rate", "ended", "limited",
                 "metered", "name", "refused", "requests", "tokens")  # fmt: skip

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self.name = key.name
        self.requests = 0
        self.ended = 0
        self.tokens = 0
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._key = key
        self._rate: Bucket | None = None
        self._token_rate: Bucket | None = None
        self.follow(key)

    def follow(self, key: Key) -> None:
        """From now on it may do what `key` says, which has its name."""
        self._key = key
        self._models = key.models
        self._most = key.max_concurrent
        per_s = (key.tokens_per_min or 0) / 60
        self._rate = self._bucket(self._rate, key.requests_per_s, key.request_burst)
        self._token_rate = self._bucket(self._token_rate, per_s, key.token_burst)
        self.limited = self._most is not None or self._rate is not None
        self.metered = self._models is not None or self._token_rate is not None

    @property
    def running(self) -> int:
        """Requests under way."""
        return self.requests - self.ended

    def allows(self, model: str) -> bool:
        """Whether it may use `model`."""
        return self._models is None or model in self._models

    def begin(self) -> None:
        """A request wants to begin.

        Raises:
            ApiError: 429: it has too many under way, or had too many in a short time.
        """
        if self._most is not None and self.running >= self._most:
            message = f"This key may have {self._most} requests under way at a time."
            raise self._limited("concurrency", message, 1.0)
        if self._rate is not None and (wait_s := self._rate.take(1)):
            message = f"This key may make {self._key.requests_per_s:g} requests per second."
            raise self._limited("requests", message, wait_s)

    def admit(self, model: str, prompt_tokens: int) -> None:
        """The request turns out to be for `model`, with a prompt of so many tokens.

        Raises:
            ApiError: 404, as for a model that does not exist; 429: it used too many tokens.
        """
        if self._models is not None and model not in self._models:
            self.refused["model"] += 1
            raise model_not_found(model)
        if self._token_rate is not None and (wait_s := self._token_rate.take(prompt_tokens)):
            message = f"This key may use {self._key.tokens_per_min:g} tokens per minute."
            raise self._limited("tokens", message, wait_s)

    def charge(self, tokens: int) -> None:
        """So many tokens were generated for it."""
        if self._token_rate is not None:
            self._token_rate.charge(tokens)

    def _bucket(self, held: Bucket | None, rate_per_s: float | None, burst: float) -> Bucket | None:
        if not rate_per_s:
            return None
        if held is None:
            return Bucket(rate_per_s, burst, self._clock)
        held.adjust(rate_per_s, burst)
        return held

    def _limited(self, reason: str, message: str, wait_s: float) -> ApiError:
        self.refused[reason] += 1
        return ApiError(429, message, code=_LIMITED, retry_after_s=max(1, ceil(wait_s)))


class KeyRing:
    """All callers, found by the key in an Authorization header.

    Keys are found by their SHA-256 in a dictionary. How long that takes tells of the hash alone,
    and nobody can make a key whose hash begins as another one's does without trying as many keys as
    would find the key itself.

    Args:
        clock: seconds, monotonic.

    Attributes:
        unknown: requests without a key, or with one that is nobody's; only grows.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_name: dict[str, Caller] = {}
        self._by_digest: dict[bytes, Caller] = {}
        self.unknown = 0

    def __len__(self) -> int:
        """How many callers."""
        return len(self._by_name)

    def find(self, authorization: str) -> Caller | None:
        """The caller whose key an Authorization header of `Bearer KEY` has; None: nobody's."""
        if len(authorization) > _MAX_AUTHORIZATION:
            return None
        key = bearer_token(authorization)
        if not key:
            return None
        try:
            return self._by_digest.get(sha256(key.encode("latin-1")).digest())
        except UnicodeEncodeError:  # headers are latin-1
            return None

    def follow(self, keys: Iterable[Key]) -> None:
        """From now on these keys are good, and no others; requests under way go on."""
        before, self._by_name, self._by_digest = self._by_name, {}, {}
        for key in keys:
            caller = before.get(key.name)
            if caller is None:
                caller = Caller(key, self._clock)
            else:
                caller.follow(key)
            self._by_name[key.name] = caller
            self._by_digest.update(dict.fromkeys(key.digests, caller))

    def all(self) -> tuple[Caller, ...]:
        """Every caller."""
        return tuple(self._by_name.values())
