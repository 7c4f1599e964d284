"""Who may begin: requests under way at a time are bounded, and those beyond wait for their turn.

A synchronous state machine over an injected clock; `QueueWait` awaits what it decides. The queue is
fair between tenants: a place that becomes free goes to the tenant with the fewest requests under
way, and within a tenant to the lowest priority, the oldest first. Where the queue is full a tenant
that has fewer requests in it pushes out the last one of the tenant that has most.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from enum import StrEnum
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ORDER: Final = attrgetter("priority", "number")
_SMOOTHING: Final = 0.1


class Turn(StrEnum):
    """What became of a request that had to wait."""

    WAITING = "waiting"
    ADMITTED = "admitted"  # it counts as under way: `Admission.leave` must end it
    PUSHED_OUT = "pushed_out"  # its place in the queue went to another tenant
    WITHDRAWN = "withdrawn"


class Waiting:
    """A request's place in the queue, from `Admission.join`.

    Its owner must `withdraw` it where it is still WAITING when nobody wants it any more.
    """

    __slots__ = ("number", "priority", "since_s", "tenant", "turn", "wake")

    def __init__(
        self, tenant: str, priority: int, number: int, since_s: float, wake: Callable[[], None]
    ) -> None:
        self.tenant = tenant
        self.priority = priority
        self.number = number
        self.since_s = since_s
        self.wake = wake
        self.turn = Turn.WAITING


class Admission:
    """Requests under way, bounded, and a bounded queue of those that wait to be.

    Args:
        limit: requests under way at a time.
        queue_size: requests that may wait; 0: none.
        clock: seconds, monotonic.

    Attributes:
        requests: under way now.
        waiting: in the queue now; nobody waits while there is room.
    """

    def __init__(
        self, limit: int, queue_size: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.queue_size = queue_size
        self.requests = 0
        self.waiting = 0
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # of tenants that wait: number of their last turn
        self._queues: dict[str, list[Waiting]] = {}
        self._number = 0
        self._mean_wait_s = 1.0

    def resize(self, limit: int | None = None, queue_size: int | None = None) -> None:
        """Other bounds from now on; who is under way or waits already stays."""
        self.limit = self.limit if limit is None else limit
        self.queue_size = self.queue_size if queue_size is None else queue_size
        self._fill()

    def enter(self, tenant: str) -> bool:
        """Whether a request of `tenant` may begin at once; if so it must `leave` when it ends."""
        if self.requests >= self.limit:
            return False
        self.requests += 1
        self._running[tenant] += 1
        return True

    def widen(self, tenant: str, count: int) -> None:
        """A request under way counts as `count` more, be that beyond the limit; they `leave` too.

        Nobody who comes later begins before enough have ended.
        """
        self.requests += count
        self._running[tenant] += count

    def leave(self, tenant: str, count: int = 1) -> None:
        """So many that had entered or been admitted have ended: their places go to the next."""
        self.requests -= count
        if self._running[tenant] <= count:
            del self._running[tenant]  # tenants that are gone must not add up
        else:
            self._running[tenant] -= count
        self._fill()

    def join(self, tenant: str, priority: int, wake: Callable[[], None]) -> Waiting | None:
        """Begin to wait; None where the queue is full and nobody can be pushed out.

        Args:
            tenant: whose request it is.
            priority: lower goes first, among requests of the same tenant.
            wake: called once, when `Waiting.turn` is ADMITTED or PUSHED_OUT; must not raise.
        """
        self._number += 1
        waiting = Waiting(tenant, priority, self._number, self._clock(), wake)
        if self.waiting >= self.queue_size:
            worst = self._worst(waiting)
            if worst is None:
                return None
            self._remove(worst)
            worst.turn = Turn.PUSHED_OUT
            worst.wake()
        insort(self._queues.setdefault(tenant, []), waiting, key=_ORDER)
        self._served.setdefault(tenant, waiting.number)
        self.waiting += 1
        return waiting

    def withdraw(self, waiting: Waiting) -> None:
        """Nobody waits for this turn any more; does nothing where it is no longer WAITING."""
        if waiting.turn is Turn.WAITING:
            self._remove(waiting)
            waiting.turn = Turn.WITHDRAWN

    def waited_s(self, waiting: Waiting) -> float:
        """How long it has been waiting."""
        return self._clock() - waiting.since_s

    @property
    def retry_after_s(self) -> int:
        """When a refused client may try again: the mean wait of those admitted, at least 1."""
        return max(1, ceil(self._mean_wait_s))

    def _fill(self) -> None:
        while self.waiting and self.requests < self.limit:
            self._admit()

    def _admit(self) -> None:
        tenant = min(self._queues, key=lambda name: (self._running[name], self._served[name]))
        waiting = self._queues[tenant][0]
        self._number += 1
        self._served[tenant] = self._number
        self._remove(waiting)
        self.requests += 1
        self._running[tenant] += 1
        self._mean_wait_s += _SMOOTHING * (self.waited_s(waiting) - self._mean_wait_s)
        waiting.turn = Turn.ADMITTED
        waiting.wake()

    def _worst(self, newcomer: Waiting) -> Waiting | None:
        """Who goes from the full queue for `newcomer`; None: it has no better claim than they."""
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
            del self._queues[waiting.tenant], self._served[waiting.tenant]
