"""Callers: which caller a key belongs to, what it may use, and what it has used.

Synchronous, over an injected clock. A caller keeps its counts and rates when the keys are read
again, as long as its name is still there.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Final

from kvrouter.credentials.caller_keys import digest
from kvrouter.errors import ApiError, model_not_found
from kvrouter_store.connection.tokens import bearer_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.credentials.caller_keys import Key
    from kvrouter.http.server.exchange import Exchange
    from kvrouter.http.server.respond import HttpRequest

_LIMITED: Final = "rate_limit_exceeded"
_MAX_AUTHORIZATION: Final = 2048  # longest header that can hold a valid key


_ROUNDING: Final = 1e-9


@dataclass(eq=False, slots=True)
class Bucket:
    """Fills at a steady rate up to its burst, and begins full.

    `charge` may leave a debt, for an answer that is longer than expected; `take` then refuses until
    the debt is refilled. In the long run no more passes than the rate.
    """

    rate_per_s: float  # above 0
    burst: float  # size of the full bucket, above 0
    clock: Callable[[], float]  # seconds, monotonic
    _level: float = field(init=False)
    _at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._level, self._at_s = self.burst, self.clock()

    def take(self, amount: float) -> float:
        """Take `amount`, if the bucket holds it or is full.

        Returns:
            0.0 if it was taken; else the seconds until it can be, and nothing is taken.
        """
        self._fill()
        needed = min(amount, self.burst)
        lacking = needed - self._level
        if lacking > needed * _ROUNDING:
            return lacking / self.rate_per_s
        self._level -= amount
        return 0.0

    def charge(self, amount: float) -> None:
        """Take `amount`, which has been used already, even if the bucket does not hold it."""
        self._fill()
        self._level -= amount

    def adjust(self, rate_per_s: float, burst: float) -> None:
        """Change the rate; a debt stays."""
        self._fill()
        self.rate_per_s, self.burst = rate_per_s, burst
        self._level = min(self._level, burst)

    def _fill(self) -> None:
        now_s = self.clock()
        level = self._level + (now_s - self._at_s) * self.rate_per_s
        self._level = min(level, self.burst)
        self._at_s = now_s


def caller_of(asked: Exchange | HttpRequest) -> Caller | None:
    """The caller that the gate found; None if callers need no key."""
    found = asked.principal
    return found if isinstance(found, Caller) else None


@dataclass(slots=True)
class UsedTokens:
    """Tokens that a caller has used of one model; they only grow."""

    prompt: int = 0
    cached: int = 0  # those of prompts that no engine computed
    generation: int = 0


@dataclass(eq=False, slots=True)
class Caller:
    """One name of the file of keys, its limits and its usage.

    Code that begins or ends a request, or uses tokens, updates the counts, which only grow.
    """

    key: Key  # the latest of its name
    clock: Callable[[], float]  # seconds, monotonic
    name: str = field(init=False)  # as in log, metrics and the fair queue
    limited: bool = field(init=False)  # whether `begin` may refuse
    metered: bool = field(init=False)
    """Whether `check` and `admit` may refuse, and `charge` must be called with the used tokens."""
    requests: int = field(default=0, init=False)  # how many have begun
    ended: int = field(default=0, init=False)  # how many of these have ended
    tokens: int = field(default=0, init=False)  # used ones of prompts and answers
    refused: Counter[str] = field(default_factory=Counter, init=False)  # requests by reason
    used: dict[str, UsedTokens] = field(default_factory=dict, init=False)  # by the model's label
    _rate: Bucket | None = field(default=None, init=False)
    _token_rate: Bucket | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.name = self.key.name
        self.follow(self.key)

    def follow(self, key: Key) -> None:
        """Take over the limits of `key`, which has the same name."""
        self.key = key
        per_s = (key.tokens_per_min or 0) / 60
        self._rate = self._bucket(self._rate, key.requests_per_s, key.request_burst or 1.0)
        self._token_rate = self._bucket(self._token_rate, per_s, key.token_burst or 1.0)
        self.limited = key.max_concurrent is not None or self._rate is not None
        self.metered = key.models is not None or self._token_rate is not None

    @property
    def running(self) -> int:
        """Requests in flight."""
        return self.requests - self.ended

    def allows(self, model: str) -> bool:
        """Whether it may use `model`."""
        return self.key.models is None or model in self.key.models

    def begin(self) -> None:
        """Check the limits of requests. ApiError: 429."""
        most = self.key.max_concurrent
        if most is not None and self.running >= most:
            message = f"This key may have {most} requests in flight at a time."
            raise self._limited("concurrency", message, 1.0)
        if self._rate is not None and (wait_s := self._rate.take(1)):
            message = f"This key may make {self.key.requests_per_s:g} requests per second."
            raise self._limited("requests", message, wait_s)

    def check(self, model: str) -> None:
        """ApiError 404, as for a missing model: it must not use `model`."""
        if not self.allows(model):
            self.refused["model"] += 1
            raise model_not_found(model)

    def admit(self, prompt_tokens: int) -> None:
        """Check the rate of tokens. ApiError: 429."""
        if self._token_rate is not None and (wait_s := self._token_rate.take(prompt_tokens)):
            message = f"This key may use {self.key.tokens_per_min:g} tokens per minute."
            raise self._limited("tokens", message, wait_s)

    def charge(self, tokens: int) -> None:
        """Count generated tokens."""
        if self._token_rate is not None:
            self._token_rate.charge(tokens)

    def use(self, model: str, prompt: int, cached: int, generated: int) -> None:
        """Count what a request has used of a model, by its label."""
        if not prompt and not generated:
            return
        used = self.used.setdefault(model, UsedTokens())
        used.prompt += prompt
        used.cached += cached
        used.generation += generated

    def _bucket(self, held: Bucket | None, rate_per_s: float | None, burst: float) -> Bucket | None:
        if not rate_per_s:
            return None
        if held is None:
            return Bucket(rate_per_s, burst, self.clock)
        held.adjust(rate_per_s, burst)
        return held

    def _limited(self, reason: str, message: str, wait_s: float) -> ApiError:
        self.refused[reason] += 1
        return ApiError(429, message, code=_LIMITED, retry_after_s=max(1, ceil(wait_s)))


class KeyRing:
    """All callers, found by the key in an Authorization header.

    A dictionary finds keys by their SHA-256, so that the time of a search reveals nothing about a
    key. `unknown` counts requests without a valid key.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_name: dict[str, Caller] = {}
        self._by_digest: dict[bytes, Caller] = {}
        self.unknown = 0

    def __len__(self) -> int:
        """Number of callers."""
        return len(self._by_name)

    def find(self, authorization: str) -> Caller | None:
        """The caller of an Authorization header `Bearer KEY`; None without a valid key."""
        if len(authorization) > _MAX_AUTHORIZATION:
            return None
        key = bearer_token(authorization)
        if not key:
            return None
        try:
            return self._by_digest.get(digest(key))
        except UnicodeEncodeError:  # headers are latin-1
            return None

    def follow(self, keys: Iterable[Key]) -> None:
        """Replace the keys; requests in flight go on."""
        before, self._by_name, self._by_digest = self._by_name, {}, {}
        for key in keys:
            caller = before.get(key.name) or Caller(key, self._clock)
            caller.follow(key)
            self._by_name[key.name] = caller
            self._by_digest.update(dict.fromkeys(key.digests, caller))

    def all(self) -> tuple[Caller, ...]:
        """Every caller."""
        return tuple(self._by_name.values())
