"""The engine with the fewest tokens in flight: tokens are the load, not requests."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Final

from kvrouter.routing.policies.base import connected, decide, in_turn, rebound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.routing.plan import Plan, RouteInputs


_TOKENS: Final = attrgetter("tokens")


class LeastTokens:
    """Each leg goes to the candidate with the fewest tokens in flight; equals take turns."""

    name: ClassVar[str] = "least_tokens"
    summary: ClassVar[str] = "the one with the fewest tokens in flight"
    needs_hashes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def plan(self, inputs: RouteInputs) -> Plan:
        """The least loaded engine of each role."""
        self._turn += 1
        price = connected(inputs, _TOKENS)

        def least(candidates: Sequence[Engine]) -> Engine:
            return min(in_turn(candidates, self._turn), key=price)

        return decide(inputs, least(inputs.decode), least)

    def rebind(
        self, inputs: RouteInputs, decode: Sequence[Engine], bound: Engine, own_tokens: int
    ) -> Engine:
        """The least loaded; among equals the bound one."""
        return rebound(decode, bound, connected(inputs, _TOKENS), own_tokens)
