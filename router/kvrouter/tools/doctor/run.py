"""Runs the doctor's checks all at once, each with a deadline, so that none holds up the others."""

from __future__ import annotations

import asyncio
import logging
import sys
import textwrap
from collections import ChainMap, Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

import orjson
import uvloop
from pydantic import Field, model_validator

from kvrouter.app.settings import RouterSettings
from kvrouter.credentials.engine_keys import WorkerKeys
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import Families
from kvrouter.membership.discovery.base import both_roles
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.options.addresses import SECURE, bare_address, unlabelled
from kvrouter.options.types import unique_stores
from kvrouter.tools.doctor.base import (
    GRAVEST_FIRST,
    Check,
    Finding,
    Host,
    Setup,
    Severity,
    SharedGroup,
    error,
)
from kvrouter.tools.doctor.discovery import read_sources
from kvrouter.tools.doctor.engine_facts import learn_engine
from kvrouter.tools.doctor.registry import CHECKS
from kvrouter.tools.doctor.sharing import shared_groups
from kvrouter.tools.doctor.store_facts import StoreFacts, learn_store
from kvrouter.tools.doctor.trials import try_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 100
REQUESTS_PER_CHECK: Final = 6
"""Requests that a check may wait for, one after the other, each with its own deadline."""
log = logging.getLogger(__name__)


class DoctorSettings(RouterSettings):
    """The set-up to check, and how. No engine is required."""

    json_output: bool = Field(
        default=False,
        description="Print JSON instead of text: an object with a list `findings`.",
        json_schema_extra={"section": "The check", "flags": ["--json"]},
    )
    strict: bool = Field(
        default=False, description="Exit with code 1 for warnings too, not only for errors."
    )
    doctor_deadline_s: float = Field(
        default=20.0,
        gt=0,
        le=600,
        description="Longest time for an engine's answer to one request of the doctor, such as a "
        "prompt of a few blocks.",
    )
    host_root: Path = Field(
        default=Path("/"),
        description="Folder that holds /proc, /sys and /dev of the host. In a container, give "
        "the path where the host's root is mounted.",
        json_schema_extra={"metavar": "FOLDER"},
    )

    @model_validator(mode="after")
    def _some_engine(self) -> DoctorSettings:
        """Replace the router's check, which requires an engine."""
        return self


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


async def examine(
    settings: RouterSettings,
    host: Host = Host(),  # noqa: B008 (immutable)
    *,
    deadline_s: float = 20.0,
    checks: Sequence[Check] = CHECKS,
) -> Report:
    """Run `checks` for a router with these settings.

    An engine may take `deadline_s` seconds for one request.
    """
    begun_s = monotonic()
    keys = WorkerKeys(settings.engine_keys())
    async with ProbeClient(keys, settings.engine_trust()) as probe:
        ports = ChainMap(settings.bootstrap_ports)
        setup = Setup(settings, host, Families(), probe, deadline_s, ports)
        setup.discovered = await read_sources(setup)
        try:
            _learn(setup)
            found = await asyncio.gather(*(_run(check, setup) for check in checks))
            shared = await shared_groups(setup)
        finally:
            await setup.close()
    rows = [(check.name, one) for check, each in zip(checks, found, strict=True) for one in each]
    rows.sort(key=lambda row: GRAVEST_FIRST.index(row[1].severity))
    return Report(tuple(rows), len(checks), monotonic() - begun_s, _subjects(setup), tuple(shared))


def _learn(setup: Setup) -> None:
    """Begin to ask the engines and the store, and to try pairs of engines."""
    settings = setup.settings
    named = [*settings.engines.items()]
    named += [one for each in setup.discovered for one in each.members.items()]
    for address, role in both_roles(named).items():
        if role is Role.STORE:
            if settings.store == settings.store_nodes:  # it is not of another project
                settings.store = unique_stores([*settings.store, address])
            continue
        engine = Engine(bare_address(address), role, tls=SECURE in address, nodes=setup.nodes)
        setup.engines[unlabelled(address)] = asyncio.create_task(learn_engine(setup, engine))
    nodes = settings.store_nodes
    setup.stores = [asyncio.create_task(learn_store(settings, url)) for url in nodes]
    if nodes:
        setup.trials = asyncio.create_task(try_pairs(setup))
    for url in nodes:
        setup.later_stores.append(asyncio.create_task(_learn_store_later(setup, url)))


async def _learn_store_later(setup: Setup, url: str) -> StoreFacts:
    await setup.all_trials()
    return await learn_store(setup.settings, url)


async def _run(check: Check, setup: Setup) -> list[Finding]:
    """The findings of one check; if it fails or hangs, a finding that says so."""
    deadline_s = REQUESTS_PER_CHECK * setup.deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            return [found async for found in check.examine(setup)]
    except TimeoutError:
        sentence = f"this check did not end within {deadline_s:g} s"
        remedy = "see which engine is slow, or raise --doctor-deadline"
    except Exception as failure:  # what one peer answers must not hide findings of others
        log.debug("check %s", check.name, exc_info=True)
        sentence = f"this check failed: {failure!r}"
        remedy = "report this sentence: it is a defect of the doctor"
    return [error("kvrouter doctor", sentence, remedy)]


def _subjects(setup: Setup) -> str:
    settings, engines = setup.settings, len(setup.engines)
    named = [f"{engines} engine{'' if engines == 1 else 's'}"] if engines else []
    named += [f"the store at {url}" for url in settings.store]
    return ", ".join([*named, "this host"])


def run(settings: DoctorSettings) -> int:
    """Print the findings; exit code 1 if there is an error, with --strict also for a warning."""
    logging.getLogger().addHandler(logging.NullHandler())  # findings replace log lines
    host = Host(settings.host_root)
    report = uvloop.run(examine(settings, host, deadline_s=settings.doctor_deadline_s))
    shown = report.json().decode() + "\n" if settings.json_output else report.text()
    sys.stdout.write(shown)
    sys.stdout.flush()
    return report.exit_code(strict=settings.strict)
