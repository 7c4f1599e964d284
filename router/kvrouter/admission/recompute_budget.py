"""What bounds the router's own promises: prompt tokens that decode engines compute at a time.

Synchronous; the clock is injected. It never waits: it grants or refuses.
"""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Grant:
    """Tokens taken from a `RecomputeBudget`; its owner must release it. Idempotent."""

    __slots__ = ("_budget", "since", "tokens")

    def __init__(self, budget: RecomputeBudget, tokens: int, since: float) -> None:
        self._budget: RecomputeBudget | None = budget
        self.tokens = tokens
        self.since = since

    def release(self) -> None:
        """Give the tokens back; later calls do nothing."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._released(self)


class RecomputeBudget:
    """Prompt tokens that the fleet's decode engines may compute at a time for want of their KV.

    So that a sick store cannot turn decode engines into prefill engines. A single request larger
    than the whole budget is granted while nothing else is: it would never run otherwise.

    Args:
        limit_tokens: the budget; 0 refuses everything.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_tokens = limit_tokens
        self.tokens = 0
        self._clock = clock
        self._mean_s = 1.0

    def take(self, tokens: int) -> Grant | None:
        """Take `tokens`, or None where that would exceed the budget."""
        alone = self.tokens == 0 and self.limit_tokens > 0
        if self.tokens + tokens > self.limit_tokens and not alone:
            return None
        self.tokens += tokens
        return Grant(self, tokens, self._clock())

    @property
    def retry_after_s(self) -> int:
        """When a refused client may try again: the mean time that grants were held, at least 1."""
        return max(1, ceil(self._mean_s))

    def _released(self, grant: Grant) -> None:
        self.tokens -= grant.tokens
        self._mean_s += 0.2 * (self._clock() - grant.since - self._mean_s)
