"""Check of the clocks of engines against this host's."""

from __future__ import annotations

from typing import Final

from kvrouter.doctor.base import Check, Finding, SetUp, Severity

MAX_SKEW_S: Final = 1.0
"""Less does no harm, and hosts without NTP soon have more."""


async def _clocks(setup: SetUp) -> list[Finding]:
    found = []
    for each in await setup.all_engines():
        skew_s = each.ahead_s
        if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
            way = "ahead of" if skew_s > 0 else "behind"
            finding = (
                f"its clock is {abs(skew_s):.0f} s or more {way} this host's: logs, traces and "
                "events cannot be put in order, and certificates may be invalid there"
            )
            remedy = "let NTP (chrony, systemd-timesyncd) set the clocks of both hosts"
            found.append(Finding(Severity.WARNING, each.name, finding, remedy))
    return found


CHECKS: Final = (
    Check("clock", "clocks of engines (by their `Date` header) agree with this host's", _clocks),
)
