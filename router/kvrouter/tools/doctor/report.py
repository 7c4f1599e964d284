"""Findings as text for a terminal and as JSON for scripts. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Final

import orjson

from kvrouter.tools.doctor.base import GRAVEST_FIRST, Finding, Severity, SharedGroup

WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of the doctor found.

    Attributes:
        rows: each finding with the name of its check, the gravest first.
        checks: how many checks ran.
        seconds: how long they took.
        subjects: what they looked at, in words.
        shared: what engines share through the store.
    """

    rows: tuple[tuple[str, Finding], ...]
    checks: int
    seconds: float
    subjects: str
    shared: tuple[SharedGroup, ...] = ()

    def exit_code(self, *, strict: bool) -> int:
        """1 if there is an error, or with `strict` a warning; else 0."""
        grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return int(any(finding.severity in grave for _, finding in self.rows))

    def json(self) -> bytes:
        """An object with `findings`, `shared`, `checks`, `subjects` and `seconds`."""
        document = {
            "findings": [{"check": check, **asdict(finding)} for check, finding in self.rows],
            "shared": [asdict(group) for group in self.shared],
            "checks": self.checks,
            "subjects": self.subjects,
            "seconds": round(self.seconds, 3),
        }
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)

    def text(self) -> str:
        """Paragraphs of at most 100 columns; ends with the counts."""
        parts = [_paragraph(check, finding) for check, finding in self.rows]
        parts += ["\n".join(map(str, self.shared))] if self.shared else []
        counts = Counter(finding.severity for _, finding in self.rows)
        found = ", ".join(_counted(counts[s], s) for s in GRAVEST_FIRST if counts[s])
        ran = f"{self.checks} checks of {self.subjects} in {self.seconds:.1f} s"
        return "\n\n".join([*parts, f"{found or 'nothing found'}: {ran}"]) + "\n"


def _paragraph(check: str, finding: Finding) -> str:
    head = f"{finding.severity.value.upper()} {check}: {finding.subject}"
    return "\n".join([head, _filled("    ", finding.finding), _filled("    -> ", finding.remedy)])


def _filled(lead: str, sentence: str) -> str:
    return textwrap.fill(
        f"{sentence[:1].upper()}{sentence[1:]}.",
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(count: int, severity: Severity) -> str:
    name = {Severity.INFO: "remark"}.get(severity, severity.value)
    return f"{count} {name}{'' if count == 1 else 's'}"
