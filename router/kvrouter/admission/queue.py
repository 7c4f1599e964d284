"""A bound of requests in flight, and a bounded queue of those that wait.

A synchronous state machine over an injected clock; `QueueWait` awaits its decisions. The queue is
fair between tenants: a free place goes to the tenant whose turns had the fewest tokens, and within
a tenant to the lowest priority, the oldest first. If the queue is full, a tenant with fewer waiting
requests pushes out the last request of the tenant with most.

`Accounts` do start-time fair queuing (Goyal, Vin and Cheng, 1996) of tokens, as the Virtual Token
Counter (Sheng et al., 2024): the tenant with the smallest account has the next turn. While two
tenants both have requests waiting, the tokens of their turns differ by a request of each at most.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.openai.request import OPEN_ENDED_TOKENS, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_RISE: Final = 1 / 8
"""Part of each turn by which the level rises above the account that paid for it.

With 0, new tenants that never stop coming would all begin at the same level, and one that owes
would wait for ever.
"""
_MOST_ABSENT: Final = 4096
_ORDER: Final = attrgetter("priority", "number")
_SMOOTHING: Final = 0.1


class Work(NamedTuple):
    """Tokens of a request, cached or not: only some engines tell what they found cached."""

    prompt_tokens: int
    answer_tokens: int  # expected; the true number is known at its end


def work_of(request: Request) -> Work:
    """The work of `request`; each sample of each prompt counts as a request of its own.

    Many clients allow far longer answers than they get. So no answer is expected to be longer than
    that of a request without max_tokens.
    """
    answers = request.n * (1 if request.prompts is None else len(request.prompts))
    allowed = OPEN_ENDED_TOKENS if request.max_tokens is None else request.max_tokens
    return Work(request.prompt_tokens * request.n, answers * min(allowed, OPEN_ENDED_TOKENS))


@dataclass(eq=False, slots=True)
class Accounts:
    """A synchronous state machine. Only the differences between accounts mean something."""

    spent: dict[str, float] = field(default_factory=dict)
    """Tokens by tenant. Those of absent tenants stay: who pauses owes as much as before."""
    era: int = 0  # rises when accounts are forgotten: what was charged before means nothing then
    _level: float = 0.0

    def open(self, tenant: str, waiting: Collection[str]) -> None:
        """`tenant` begins to wait, beside those `waiting`: idle time has earned it nothing.

        If too many absent tenants have accounts, all of them are forgotten: so many turns after its
        own, a tenant owes little.
        """
        if len(self.spent) > len(waiting) + _MOST_ABSENT:
            self.spent = {each: self.spent[each] for each in waiting}
            self.era += 1
        self.spent[tenant] = max(self._level, self.spent.get(tenant, 0.0))

    def charge(self, tenant: str, tokens: int) -> None:
        """The turn of `tenant` has come, for a request of so many tokens."""
        spent = self.spent[tenant]
        self.spent[tenant] = spent + tokens
        self._level = max(self._level, spent + tokens * _RISE)

    def correct(self, tenant: str, tokens: int, era: int) -> None:
        """A request has used so many tokens more than were charged in `era`; negative: fewer."""
        if era == self.era and tenant in self.spent:
            self.spent[tenant] += tokens

    def close(self) -> None:
        """Nobody lacks anything: nobody owes anything."""
        self.spent.clear()
        self.era += 1
        self._level = 0.0


class Turn(StrEnum):
    """The state of a request that had to wait."""

    WAITING = "waiting"
    ADMITTED = "admitted"  # it is in flight: `Admission.leave` must end it
    PUSHED_OUT = "pushed_out"  # its place in the queue went to another tenant
    WITHDRAWN = "withdrawn"


@dataclass(slots=True, eq=False)
class Waiting:
    """A request's place in the queue, from `Admission.join`.

    Its owner must `withdraw` it if it gives up.
    """

    tenant: str
    priority: int
    work: Work
    number: int  # in the order of arrival
    since_s: float
    wake: Callable[[], None]
    turn: Turn = Turn.WAITING
    era: int = 0  # of the accounts, when its turn came


@dataclass(eq=False)
class Admission:
    """Admits requests, or queues them."""

    limit: int  # requests in flight at a time
    queue_size: int = 0  # requests that may wait
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    requests: int = field(default=0, init=False)  # in flight now
    waiting: int = field(default=0, init=False)  # in the queue now; 0 while there is room
    _accounts: Accounts = field(default_factory=Accounts, init=False)
    _queues: dict[str, list[Waiting]] = field(default_factory=dict, init=False)
    _number: int = field(default=0, init=False)
    _mean_wait_s: float = field(default=1.0, init=False)

    def resize(self, limit: int, queue_size: int) -> None:
        """Change the bounds; requests in flight or in the queue stay."""
        self.limit, self.queue_size = limit, queue_size
        self._fill()

    def enter(self) -> bool:
        """Whether a request may begin at once; if so, its owner must call `leave`.

        Its tokens count nowhere: nobody has to wait for its sake.
        """
        if self.requests >= self.limit:
            return False
        self.requests += 1
        if self._accounts.spent:
            self._accounts.close()
        return True

    def widen(self, count: int) -> None:
        """Count an admitted request as `count` additional ones, even above the limit.

        They must `leave` too.
        """
        self.requests += count

    def leave(self, count: int = 1) -> None:
        """`count` admitted requests have ended: their places go to the next."""
        self.requests -= count
        self._fill()

    def correct(self, waiting: Waiting, generated: int) -> None:
        """A request that was ADMITTED has ended, with so many tokens of an answer."""
        tokens = generated - waiting.work.answer_tokens
        self._accounts.correct(waiting.tenant, tokens, waiting.era)

    def refund(self, waiting: Waiting) -> None:
        """A request that was ADMITTED did not begin; `leave` gives its place back."""
        self._accounts.correct(waiting.tenant, -sum(waiting.work), waiting.era)

    def join(
        self, tenant: str, priority: int, work: Work, wake: Callable[[], None]
    ) -> Waiting | None:
        """Enter the queue; None if it is full and no other request has to go.

        Args:
            tenant: of the request.
            priority: lower goes first, among requests of the same tenant.
            work: of the request; call `correct` when it has ended.
            wake: called once, when `Waiting.turn` is ADMITTED or PUSHED_OUT; must not raise.
        """
        self._number += 1
        waiting = Waiting(tenant, priority, work, self._number, self.clock(), wake)
        if self.waiting >= self.queue_size:
            worst = self._worst(waiting)
            if worst is None:
                return None
            self._remove(worst)
            worst.turn = Turn.PUSHED_OUT
            worst.wake()
        if tenant not in self._queues:
            self._accounts.open(tenant, self._queues)
        insort(self._queues.setdefault(tenant, []), waiting, key=_ORDER)
        self.waiting += 1
        return waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Leave the queue; does nothing unless `waiting` is WAITING."""
        if waiting.turn is Turn.WAITING:
            self._remove(waiting)
            waiting.turn = Turn.WITHDRAWN

    def waited_s(self, waiting: Waiting) -> float:
        """Seconds since it entered the queue."""
        return self.clock() - waiting.since_s

    @property
    def retry_after_s(self) -> int:
        """Retry-After of a refused request: the mean wait of admitted ones, at least 1."""
        return max(1, ceil(self._mean_wait_s))

    def _fill(self) -> None:
        while self.waiting and self.requests < self.limit:
            self._admit()

    def _admit(self) -> None:
        tenant = min(self._queues, key=self._accounts.spent.__getitem__)
        waiting = self._queues[tenant][0]
        self._accounts.charge(tenant, sum(waiting.work))
        waiting.era = self._accounts.era
        self._remove(waiting)
        self.requests += 1
        self._mean_wait_s += _SMOOTHING * (self.waited_s(waiting) - self._mean_wait_s)
        waiting.turn = Turn.ADMITTED
        waiting.wake()

    def _worst(self, newcomer: Waiting) -> Waiting | None:
        """The request to push out for `newcomer`; None: it has no better claim than the others."""
        if not self._queues:
            return None
        longest = max(self._queues, key=lambda name: len(self._queues[name]))
        own = self._queues.get(newcomer.tenant, [])
        if len(self._queues[longest]) > len(own) + 1:
            return self._queues[longest][-1]
        return own[-1] if own and own[-1].priority > newcomer.priority else None

    def _remove(self, waiting: Waiting) -> None:
        queue = self._queues[waiting.tenant]
        queue.remove(waiting)
        self.waiting -= 1
        if not queue:
            del self._queues[waiting.tenant]
