"""Every check of the doctor, in the order in which findings of one severity are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor import (
    clock,
    end_to_end,
    engines,
    events,
    limits,
    pages,
    rdma,
    sharing,
    sources,
    store,
    tokenizers,
)

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Check

TOPICS: Final = (
    ("Where engines come from", sources.CHECKS),
    ("Engines", engines.CHECKS),
    ("What engines share", sharing.CHECKS),
    ("Tokens", tokenizers.CHECKS),
    ("The store", store.CHECKS),
    ("A prompt through both legs", end_to_end.CHECKS),
    ("KV events", events.CHECKS),
    ("Clocks", clock.CHECKS),
    ("Limits of this host", limits.CHECKS),
    ("Memory of a store on this host", pages.CHECKS),
    ("RDMA on this host", rdma.CHECKS),
)
"""A new check is a row of its topic's CHECKS; a new topic is a row here."""

CHECKS: Final[tuple[Check, ...]] = tuple(check for _, checks in TOPICS for check in checks)

HEAD: Final = """\
# Checks of kvrouter doctor

<!-- Written by `python -m kvrouter.tools.doctor.registry`; do not edit. -->

What [`kvrouter doctor`](doctor.md) checks:

| Check | Makes sure that |
|---|---|"""


def checks_page() -> str:
    """The whole of docs/doctor-checks.md, in Markdown."""
    rows = [HEAD]
    for topic, checks in TOPICS:
        rows.append(f"| **{topic}** | |")
        rows += [
            f"| `{check.name}` | {check.looks_at.replace('|', chr(92) + '|')} |" for check in checks
        ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(checks_page(), end="")
