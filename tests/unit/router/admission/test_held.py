"""What a request holds: each thing once, and nothing when it has ended."""

from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.router.conftest import Clock

from kvrouter.admission.held import HeldResources, RecomputeBudget

LIMIT = 100


class Lease:
    def __init__(self) -> None:
        self.open = True

    def release(self) -> None:
        self.open = False


class Requests(RuleBasedStateMachine):
    """Two requests that take from one budget, in any order, also after their end."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = RecomputeBudget(LIMIT, Clock())
        self.requests = [HeldResources(), HeldResources()]
        self.leases: list[list[Lease]] = [[], []]
        self.wanted = [0, 0]
        self.over = [False, False]

    @rule(at=st.integers(0, 1), tokens=st.integers(0, 2 * LIMIT))
    def recompute(self, at: int, tokens: int) -> None:
        others = self.budget.tokens - (self.requests[at].grant_tokens or 0)
        before = self.requests[at].grant_tokens
        granted = self.requests[at].recompute(self.budget, tokens)
        assert granted or others + tokens > LIMIT
        assert not granted or others + tokens <= LIMIT or not others or (before or 0) >= tokens
        if granted:
            self.wanted[at] = max(self.wanted[at], tokens)

    @rule(at=st.integers(0, 1), landed=st.booleans())
    def keep(self, at: int, landed: bool) -> None:
        lease = Lease() if landed else None
        self.leases[at] += [lease] if lease is not None else []
        self.requests[at].keep(cast("Any", lease))
        assert self.requests[at].leased is (landed and not self.over[at])

    @rule(at=st.integers(0, 1))
    def end(self, at: int) -> None:
        self.requests[at].release()
        self.over[at] = True

    @invariant()
    def the_budget_counts_what_is_held(self) -> None:
        held = [request.grant_tokens or 0 for request in self.requests]
        assert self.budget.tokens == sum(held)
        assert held == [0 if o else w for o, w in zip(self.over, self.wanted, strict=True)]

    @invariant()
    def a_request_holds_one_lease_at_most(self) -> None:
        for request, leases in zip(self.requests, self.leases, strict=True):
            assert sum(lease.open for lease in leases) == request.leased


TestRequests = Requests.TestCase
