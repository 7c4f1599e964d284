"""Load of one prompt's legs on engines, counted from the plan on.

A decode leg is sent long after its engine was chosen. Plans made meanwhile must see its load, and
which blocks the engines of both legs will hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.in_flight import InFlightPrefixes, marks_of

if TYPE_CHECKING:
    from kvrouter.engines.pool import EnginePool, Ticket


class LegReservations:
    """At most one reservation per leg of one prompt. Its owner must call `release` in the end.

    `hashes` are those of the prompt's blocks, 32 bytes each; None: unknown.
    """

    __slots__ = ("_in_flight", "_marks", "_pool", "_tickets")

    def __init__(self, pool: EnginePool, in_flight: InFlightPrefixes, hashes: bytes | None) -> None:
        self._pool = pool
        self._in_flight = in_flight
        self._marks = marks_of(hashes) if hashes else ()
        self._tickets: list[Ticket | None] = [None, None]

    def plan(
        self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0, work_s: float = 0
    ) -> Ticket:
        """Count `leg` (PREFILL or DECODE) on `engine` from now on, and no longer where it was.

        A prefill leg is estimated to take `work_s`. Returns its ticket, which this object owns.
        """
        held = self._tickets[leg is Role.DECODE]
        if held is not None:
            same = held.tokens == tokens and held.computing_tokens == computing_tokens
            if held.engine is engine and same:
                return held
            self.end(leg)
        self._tickets[leg is Role.DECODE] = ticket = self._pool.reserve(
            engine,
            tokens,
            begun=False,
            computing_tokens=computing_tokens,
            prefill=leg is Role.PREFILL,
            work_s=work_s,
        )
        self._in_flight.add(engine, self._marks)
        return ticket

    def begin(self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0) -> None:
        """The same for a leg that is sent now: it is in flight until it leaves."""
        self.plan(leg, engine, tokens, computing_tokens).begin()

    def tokens(self, leg: Role) -> int:
        """The load of `leg`; 0 without a reservation."""
        ticket = self._tickets[leg is Role.DECODE]
        return ticket.tokens if ticket is not None else 0

    def computed(self) -> None:
        """The answer has begun: the prompt is computed. Idempotent."""
        for ticket in self._tickets:
            if ticket is not None:
                ticket.computed()

    def end(self, leg: Role) -> None:
        """`leg` has ended, or there will be none. Idempotent."""
        at = leg is Role.DECODE
        ticket, self._tickets[at] = self._tickets[at], None
        if ticket is not None:
            self._in_flight.remove(ticket.engine, self._marks)
            ticket.release()

    def release(self) -> None:
        """Both legs have ended. Idempotent."""
        self.end(Role.PREFILL)
        self.end(Role.DECODE)
