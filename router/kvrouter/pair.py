"""Two legs at once: engines that find each other by themselves, once both have their request.

Neither may be left waiting for the other: where one fails before the client has seen anything, the
other is withdrawn, and both are asked anew, with a new meeting.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.engine import Failure
from kvrouter.errors import ApiError, bad_request
from kvrouter.leg import MAX_ATTEMPTS, NOT_TAKEN, LegFailed, decode_error
from kvrouter.plan import without
from kvrouter.release import pinned

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvrouter.engine import Engine
    from kvrouter.families.base import Meeting
    from kvrouter.leg import Legs
    from kvrouter.passage import Passage
    from kvrouter.plan import Plan, RouteInputs
    from kvrouter.policies.base import Policy
    from kvrouter.release import Releases

_RANK: Final = re.compile(rb"x-data-parallel-rank:[^\r\n]*\r\n", re.IGNORECASE)


class Leg(Protocol):
    """Does one leg of a pair on an engine; cancelling ends it there."""

    def __call__(
        self, passage: Passage, engine: Engine, *, meeting: Meeting
    ) -> Coroutine[None, None, None]:
        """The leg of `passage` on `engine`."""


class Pairs:
    """Sends the legs of requests to pairs of engines.

    Args:
        policy: chooses the pairs.
        legs: knows each engine's family.
        releases: frees what a prefill engine keeps for a decode engine that was not reached.
    """

    def __init__(self, policy: Policy, legs: Legs, releases: Releases) -> None:
        self._policy = policy
        self._legs = legs
        self._releases = releases

    async def serve(
        self,
        passage: Passage,
        model: str,
        inputs: RouteInputs,
        *,
        prefill: Leg,
        decode: Leg,
    ) -> RouteInputs | None:
        """Do both legs, on other engines as long as the client has seen nothing of them.

        Returns:
            None where the client has its answer; else `passage.plan` names a decode engine that
            can do without a prefill leg, and this is what others there are.

        Raises:
            ApiError: no pair of engines can do it.
            Refused: an engine refused the request itself.
        """
        plan = passage.plan
        for attempt in range(1, MAX_ATTEMPTS + 1):
            assert plan is not None
            passage.plan, passage.handoff = plan, None
            self._check(passage, plan, inputs)
            if plan.prefill is None:
                return inputs
            family = self._legs.family(plan.decode)
            meeting = family.meet(plan.prefill)
            if family.lease_s:  # from when on, nobody hears who cuts the leg off
                passage.pinned = pinned(meeting.decode["kv_transfer_params"], family.lease_s)
            try:
                await both(
                    passage,
                    prefill(passage, plan.prefill, meeting=meeting),
                    decode(passage, plan.decode, meeting=meeting),
                )
                passage.pinned = None
                return None
            except LegFailed as failed:
                passage.error = str(failed)
                if failed.engine is plan.decode and failed.failure in NOT_TAKEN:
                    self._releases.begin(passage, model)
                passage.pinned = None
                inputs = _others(inputs, plan, failed)
                if not inputs.decode or attempt == MAX_ATTEMPTS:
                    raise decode_error(failed) from None
            plan = self._policy.plan(inputs)
        raise AssertionError("unreachable")

    def _check(self, passage: Passage, plan: Plan, inputs: RouteInputs) -> None:
        """That the decode engine can do it as planned.

        Raises:
            ApiError: it answers nothing that has no prefill leg.
        """
        identity, request = plan.decode.identity, passage.request
        if identity is None or identity.alone or request is None:
            return
        if not inputs.split:
            name = self._legs.family(plan.decode).single_leg(request)
            raise bad_request(f"`{name}` is not served by engines that only decode.", name)
        if plan.prefill is None:
            raise ApiError(503, "No prefill engine is available.", retry_after_s=1)


def _others(inputs: RouteInputs, plan: Plan, failed: LegFailed) -> RouteInputs:
    """Without the engine that failed, and those that left meanwhile.

    Where both were silent nobody knows which one is to blame: without either, if that leaves any.
    """
    prefill = [e for e in inputs.prefill if e is not failed.engine and e.identity is not None]
    decode = [e for e in inputs.decode if e is not failed.engine and e.identity is not None]
    if failed.failure is Failure.TIMEOUT:
        prefill = [e for e in prefill if e is not plan.prefill] or prefill
        decode = [e for e in decode if e is not plan.decode] or decode
    return without(inputs, prefill=prefill, decode=decode)


async def both(
    passage: Passage,
    prefill: Coroutine[None, None, None],
    decode: Coroutine[None, None, None],
) -> None:
    """Do both legs; nothing runs on when this returns.

    A prefill leg that fails when the answer has begun is no matter: its KV is with the decode
    engine, or that one would have nothing to say. One that has not ended with the answer is cut
    off.

    Raises:
        LegFailed, Refused: by the leg that ended first.
    """
    first = asyncio.create_task(prefill, name="prefill leg")
    second = asyncio.create_task(decode, name="decode leg")
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and (first.exception() is None or passage.first_s):
            await asyncio.wait({second})
        if second.done() and second.exception() is None:
            return
        if first.done():
            first.result()
        if second.done():
            second.result()
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


def prefill_fields(passage: Passage, meeting: Meeting) -> bytes:
    """Header lines of the prefill leg: the meeting says on which rank it runs, not the client."""
    return _RANK.sub(b"", passage.fields) + meeting.fields
