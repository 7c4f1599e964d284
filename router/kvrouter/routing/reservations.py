"""The places of one prompt's legs on engines: counted from the plan on, not once they are sent.

A decode leg is sent long after its engine was chosen. What is planned meanwhile must see its load,
and which blocks the engines of both legs will hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.engines.engine import Role
from kvrouter.prefix.in_flight import marks_of

if TYPE_CHECKING:
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EnginePool, Ticket
    from kvrouter.prefix.in_flight import InFlightPrefixes


class LegReservations:
    """At most one place for each leg of one prompt. Its owner must call `release` in the end.

    Args:
        pool: counts the legs.
        expected: is told which blocks are on their way to which engine.
        hashes: of the prompt's blocks, 32 bytes each, where they are known.
    """

    __slots__ = ("_expected", "_marks", "_pool", "_tickets")

    def __init__(self, pool: EnginePool, expected: InFlightPrefixes, hashes: bytes | None) -> None:
        self._pool = pool
        self._expected = expected
        self._marks = marks_of(hashes) if hashes else ()
        self._tickets: list[Ticket | None] = [None, None]

    def plan(self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0) -> Ticket:
        """Count `leg` on `engine` from now on, and no longer where it counted before.

        Args:
            leg: PREFILL or DECODE.
            engine: where it goes.
            tokens: its load.
            computing_tokens: those of the prompt that a decode leg has to compute there.

        Returns:
            its ticket, which stays this object's.
        """
        at = leg is Role.DECODE
        held = self._tickets[at]
        if held is not None:
            same = held.tokens == tokens and held.computing_tokens == computing_tokens
            if held.engine is engine and same:
                return held
            self.leave(leg)
        ticket = self._pool.reserve(engine, tokens, begun=False, computing_tokens=computing_tokens)
        self._tickets[at] = ticket
        self._expected.add(engine, self._marks)
        return ticket

    def begin(self, leg: Role, engine: Engine, tokens: int, computing_tokens: int = 0) -> None:
        """The same for a leg that is sent now: it is under way until it leaves."""
        self.plan(leg, engine, tokens, computing_tokens).begin()

    def tokens(self, leg: Role) -> int:
        """The load of `leg` where it counts; 0 where it does not."""
        ticket = self._tickets[leg is Role.DECODE]
        return ticket.tokens if ticket is not None else 0

    def computed(self) -> None:
        """The answer has begun: what was to be computed of the prompt is. Idempotent."""
        for ticket in self._tickets:
            if ticket is not None:
                ticket.computed()

    def leave(self, leg: Role) -> None:
        """`leg` has ended, or there will be none. Idempotent."""
        at = leg is Role.DECODE
        ticket, self._tickets[at] = self._tickets[at], None
        if ticket is not None:
            self._expected.remove(ticket.engine, self._marks)
            ticket.release()

    def release(self) -> None:
        """Both legs have ended. Idempotent."""
        self.leave(Role.PREFILL)
        self.leave(Role.DECODE)
