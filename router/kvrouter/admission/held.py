"""What a request holds of others until its answer begins: a lease, a grant, a pin.

Only these methods take and give back, so that nothing is lost when another comes in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.prefix.groups import Leases

MARGIN_S: Final = 5.0
"""Before the end of a lease: KV that is older may be gone, or a decode engine has it."""


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
    """Bounds the prompt tokens that decode engines compute at a time because their KV is missing.

    Without it a sick store would turn decode engines into prefill engines. It grants or refuses,
    and never waits. A limit of 0 refuses everything; a request above it is granted if it is alone.
    """

    limit_tokens: int  # may change
    clock: Callable[[], float] = monotonic  # seconds, monotonic
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


@dataclass(frozen=True, slots=True)
class Pinned:
    """KV that a prefill engine keeps for one decode engine."""

    params: bytes  # raw JSON of the `kv_transfer_params` that fetch it
    until_s: float  # when it may be gone, on the monotonic clock


@dataclass(eq=False, slots=True)
class HeldResources:
    """Each thing once. Its owner must `release` it; what comes later is given back at once.

    A pin is no part of that: `Releases` asks the engine to free what is pinned.
    """

    _pinned: Pinned | None = None
    _lease: Leases | None = None
    _grant: Grant | None = None
    _over: bool = False

    @property
    def leased(self) -> bool:
        """Whether a lease keeps its blocks in the store."""
        return self._lease is not None

    @property
    def grant_tokens(self) -> int | None:
        """Tokens that its decode engine may compute, which should have been loaded; None: none."""
        return self._grant.tokens if self._grant is not None else None

    @property
    def pinned(self) -> Pinned | None:
        """What a prefill engine keeps for a decode engine that has not answered yet."""
        return self._pinned

    def pin(self, params: bytes, lease_s: float) -> None:
        """A prefill engine keeps what `params` fetch, for `lease_s` from now on."""
        self._pinned = Pinned(params, monotonic() + lease_s - MARGIN_S)

    def unpin(self) -> Pinned | None:
        """Forget what was pinned, and return it: it was fetched, or its engine is to free it."""
        pinned, self._pinned = self._pinned, None
        return pinned

    def keep(self, lease: Leases | None) -> None:
        """Hold `lease` in place of an earlier one."""
        before, self._lease = self._lease, lease
        if before is not None and before is not lease:
            before.release()
        if self._over:
            self.release()

    def recompute(self, budget: RecomputeBudget, tokens: int) -> bool:
        """Hold a grant of at least `tokens`; False: the budget has no room for them."""
        grant = budget.take(tokens, self._grant)
        if grant is not None:
            self._grant = grant
        if self._over:
            self.release()
        return grant is not None

    def release(self) -> None:
        """Give back lease and grant, and keep no others. Idempotent."""
        self._over = True
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        grant, self._grant = self._grant, None
        if grant is not None:
            grant.release()
