"""The parts of the time to the first token: what each step of a request took. Pure arithmetic.

Where legs overlap, each moment belongs to the earliest part that has not ended, so that the parts
always add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrouter.serving.request.context import Timing


Parts = tuple[float, float, float, float, float, float]


def parts_of(timing: Timing, until_s: float) -> Parts:
    """Seconds of each of `PARTS` from the request's arrival until `until_s`; their sum is all.

    Args:
        timing: of the request.
        until_s: its first byte, or its end if it had none; on the monotonic clock.
    """
    waited_s, tokenising_s = timing.waited_s, timing.tokenising_s
    planned_s = min(timing.planned_s or until_s, until_s)
    prefilled_s = min(max(timing.prefilled_s, planned_s), until_s)
    landed_s = min(max(timing.landed_s, prefilled_s), until_s)
    return (
        waited_s,
        tokenising_s,
        planned_s - timing.started_s - waited_s - tokenising_s,
        prefilled_s - planned_s,
        landed_s - prefilled_s,
        until_s - landed_s,
    )


def ms(seconds: float) -> float:
    """Milliseconds as the log has them, to a microsecond."""
    return int(seconds * 1e6 + 0.5) / 1000
