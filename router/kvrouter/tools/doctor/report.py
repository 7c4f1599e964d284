"""How findings are shown: as text for a terminal, as JSON for scripts. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter.tools.doctor.base import GRAVEST_FIRST, Severity

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Finding

WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of the doctor found.

    Attributes:
        rows: each finding with the name of its check, the gravest first.
        checks: how many checks were made.
        seconds: how long it took.
        subjects: what was looked at, in words.
    """

    rows: tuple[tuple[str, Finding], ...]
    checks: int
    seconds: float
    subjects: str

    def exit_code(self, *, strict: bool) -> int:
        """1 where there is an error, or with `strict` a warning; else 0."""
        grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return int(any(finding.severity in grave for _, finding in self.rows))

    def json(self) -> bytes:
        """An object with `findings`, and what was looked at."""
        findings = [_row(check, finding) for check, finding in self.rows]
        told = {
            "findings": findings,
            "checks": self.checks,
            "subjects": self.subjects,
            "seconds": round(self.seconds, 3),
        }
        return orjson.dumps(told, option=orjson.OPT_INDENT_2)

    def text(self) -> str:
        """Lines of at most 100 characters, a blank one between findings; ends with the sum."""
        parts = [_paragraph(check, finding) for check, finding in self.rows]
        counts = Counter(finding.severity for _, finding in self.rows)
        told = ", ".join(_counted(counts[s], s) for s in GRAVEST_FIRST if counts[s])
        took = f"{self.checks} checks of {self.subjects} in {self.seconds:.1f} s"
        return "\n\n".join([*parts, f"{told or 'nothing found'}: {took}"]) + "\n"


def _row(check: str, finding: Finding) -> dict[str, Any]:
    return {
        "check": check,
        "severity": finding.severity.value,
        "subject": finding.subject,
        "finding": finding.finding,
        "remedy": finding.remedy,
    }


def _paragraph(check: str, finding: Finding) -> str:
    head = f"{finding.severity.value.upper()} {check}: {finding.subject}"
    return "\n".join([head, _filled("", finding.finding), _filled("-> ", finding.remedy)])


def _filled(lead: str, sentence: str) -> str:
    indent = " " * 4
    return textwrap.fill(
        f"{sentence[:1].upper()}{sentence[1:]}.",
        WIDTH,
        initial_indent=indent + lead,
        subsequent_indent=indent + " " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(count: int, severity: Severity) -> str:
    name = {Severity.INFO: "remark"}.get(severity, severity.value)
    return f"{count} {name}{'' if count == 1 else 's'}"
