"""Bounds the prompt tokens that decode engines compute at a time because their KV is missing.

Without it a sick store would turn decode engines into prefill engines. Synchronous, over an
injected clock; it grants or refuses, and never waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False, slots=True)
class Grant:
    """Tokens taken from a `RecomputeBudget`; its owner must release it."""

    _budget: RecomputeBudget | None  # None: it is released
    tokens: int
    since: float

    def release(self) -> None:
        """Give the tokens back. Idempotent."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._released(self)


@dataclass(eq=False)
class RecomputeBudget:
    """Grants tokens within a limit; 0 refuses everything.

    A request above the limit is granted if it is alone.
    """

    limit_tokens: int  # may change
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    tokens: int = field(default=0, init=False)  # granted now
    _mean_s: float = field(default=1.0, init=False)

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
            return Grant(self, tokens, self.clock())
        held.tokens += more
        return held

    @property
    def retry_after_s(self) -> int:
        """Retry-After of a refused request: the mean time between take and release, at least 1."""
        return max(1, ceil(self._mean_s))

    def _released(self, grant: Grant) -> None:
        self.tokens -= grant.tokens
        self._mean_s += 0.2 * (self.clock() - grant.since - self._mean_s)
