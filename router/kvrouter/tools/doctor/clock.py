"""Check of the clocks of engines against this host's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Check, SetUp, warning

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Found

MAX_SKEW_S: Final = 1.0
"""Less does no harm, and hosts without NTP soon have more."""


async def _clocks(setup: SetUp) -> Found:
    for each in await setup.all_engines():
        skew_s = each.ahead_s
        if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            yield warning(
                each.name,
                f"its clock is {abs(skew_s):.0f} s or more {way} this host's: logs, traces and "
                "events cannot be put in order, and certificates may be invalid there",
                "let NTP (chrony, systemd-timesyncd) set the clocks of both hosts",
            )


CHECKS: Final = (
    Check("clock", "clocks of engines (by their `Date` header) agree with this host's", _clocks),
)
