"""Bounds the prompt tokens that decode engines compute at a time because their KV is missing.

Without it a sick store would turn decode engines into prefill engines. Synchronous, over an
injected clock; it grants or refuses, and never waits.
"""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Grant:
    """Tokens taken from a `RecomputeBudget`; its owner must release it."""

    __slots__ = ("_budget", "since", "tokens")

    def __init__(self, budget: RecomputeBudget, tokens: int, since: float) -> None:
        self._budget: RecomputeBudget | None = budget
        self.tokens = tokens
        self.since = since

    def release(self) -> None:
        """Give the tokens back. Idempotent."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._released(self)


class RecomputeBudget:
    """Grants tokens within a limit; 0 refuses everything.

    A request above the limit is granted if it is alone.
    """

    def __init__(self, limit_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_tokens = limit_tokens
        self.tokens = 0
        self._clock = clock
        self._mean_s = 1.0

    def take(self, tokens: int, held: Grant | None = None) -> Grant | None:
        """Take `tokens`; None if that exceeds the budget.

        Where the same prompt has `held` some, that grant grows to `tokens` and is returned.
        """
        more = max(0, tokens - held.tokens) if held is not None else tokens
        others = self.tokens - (held.tokens if held is not None else 0)
        alone = others == 0 and self.limit_tokens > 0
        if (more or held is None) and self.tokens + more > self.limit_tokens and not alone:
            return None
        self.tokens += more
        if held is None:
            return Grant(self, tokens, self._clock())
        held.tokens += more
        return held

    @property
    def retry_after_s(self) -> int:
        """Retry-After of a refused request: the mean time between take and release, at least 1."""
        return max(1, ceil(self._mean_s))

    def _released(self, grant: Grant) -> None:
        self.tokens -= grant.tokens
        self._mean_s += 0.2 * (self._clock() - grant.since - self._mean_s)
