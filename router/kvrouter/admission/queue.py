"""A bound of requests in flight, and a bounded queue of those that wait.

A synchronous state machine over an injected clock; `QueueWait` awaits its decisions. The queue is
fair between tenants: a free place goes to the tenant with the fewest requests in flight, and within
a tenant to the lowest priority, the oldest first. If the queue is full, a tenant with fewer waiting
requests pushes out the last request of the tenant with most.
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
    """The state of a request that had to wait."""

    WAITING = "waiting"
    ADMITTED = "admitted"  # it is in flight: `Admission.leave` must end it
    PUSHED_OUT = "pushed_out"  # its place in the queue went to another tenant
    WITHDRAWN = "withdrawn"


class Waiting:
    """A request's place in the queue, from `Admission.join`.

    Its owner must `withdraw` it if it gives up.
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
    """Admits requests, or queues them.

    Args:
        limit: requests in flight at a time.
        queue_size: requests that may wait.
        clock: seconds, monotonic.

    Attributes:
        requests: in flight now.
        waiting: in the queue now; 0 while there is room.
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
        """Change the bounds; requests in flight or in the queue stay."""
        self.limit = self.limit if limit is None else limit
        self.queue_size = self.queue_size if queue_size is None else queue_size
        self._fill()

    def enter(self, tenant: str) -> bool:
        """Whether a request of `tenant` may begin at once; if so, its owner must call `leave`."""
        if self.requests >= self.limit:
            return False
        self.requests += 1
        self._running[tenant] += 1
        return True

    def widen(self, tenant: str, count: int) -> None:
        """Count an admitted request as `count` additional ones, even above the limit.

        They must `leave` too.
        """
        self.requests += count
        self._running[tenant] += count

    def leave(self, tenant: str, count: int = 1) -> None:
        """`count` admitted requests have ended: their places go to the next."""
        self.requests -= count
        if self._running[tenant] <= count:
            del self._running[tenant]  # tenants that are gone must not add up
        else:
            self._running[tenant] -= count
        self._fill()

    def join(self, tenant: str, priority: int, wake: Callable[[], None]) -> Waiting | None:
        """Enter the queue; None if it is full and no other request has to go.

        Args:
            tenant: of the request.
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
        """Leave the queue; does nothing unless `waiting` is WAITING."""
        if waiting.turn is Turn.WAITING:
            self._remove(waiting)
            waiting.turn = Turn.WITHDRAWN

    def waited_s(self, waiting: Waiting) -> float:
        """Seconds since it entered the queue."""
        return self._clock() - waiting.since_s

    @property
    def retry_after_s(self) -> int:
        """Retry-After of a refused request: the mean wait of admitted ones, at least 1."""
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
            del self._queues[waiting.tenant], self._served[waiting.tenant]
