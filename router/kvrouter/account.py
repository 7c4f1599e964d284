"""The parts of the time of one request, and what its trace tells of its plan. Pure arithmetic.

The time to the first token is told apart into parts that follow each other on the request's way.
Where legs overlap, each moment belongs to the earliest part that has not ended, so that the parts
always add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter import _native

if TYPE_CHECKING:
    from kvrouter.passage import Passage
    from kvrouter.tracing.trace import Trace

PARTS: Final = ("queue", "tokenise", "plan", "prefill", "landing", "decode")
"""Parts of the time to the first token, in their order."""
NOT_WELL: Final = frozenset({"broken", "client_left", "cut_off", "error", "refused"})
"""Outcomes of requests that were not answered well."""

Parts = tuple[float, float, float, float, float, float]


def parts_of(passage: Passage, until_s: float) -> Parts:
    """Seconds of each of `PARTS` from the request's arrival until `until_s`; their sum is all.

    Args:
        passage: the request.
        until_s: its first byte, or its end where it had none; on the monotonic clock.
    """
    return _native.parts_of(
        passage.started_s,
        passage.waited_s,
        passage.tokenising_s,
        passage.planned_s,
        passage.prefilled_s,
        passage.landed_s,
        until_s,
    )


def trace_plan(passage: Passage, trace: Trace) -> None:
    """A span for the plan, from what came before it; parsing is told with it."""
    assert passage.plan is not None
    begun_s = max((span.ended_s for span in trace.spans[1:]), default=passage.started_s)
    found: dict[str, str | int] = {
        "kvrouter.plan": passage.plan.why,
        "kvrouter.hit_engine_tokens": passage.hit_engine,
        "kvrouter.hit_store_tokens": passage.hit_store,
    }
    trace.note("kvrouter.plan", begun_s, passage.planned_s, found)
