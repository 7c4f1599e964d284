"""Runs the doctor: it asks engines and the store, then runs its checks all at once.

Each check has a deadline, so that none holds up the others.
"""

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
from kvrouter.options.addresses import SECURE, bare_address
from kvrouter.options.complaints import UsageError
from kvrouter.options.types import unique_stores
from kvrouter.tools.doctor.base import (
    GRAVEST_FIRST,
    Check,
    Finding,
    Host,
    Setup,
    Severity,
    error,
)
from kvrouter.tools.doctor.engines import learn_engine, read_sources
from kvrouter.tools.doctor.registry import CHECKS
from kvrouter.tools.doctor.sharing import SharedGroup, shared_groups
from kvrouter.tools.doctor.store import learn_store
from kvrouter.tools.doctor.trials import try_pairs
from kvrouter.tools.status import StatusSettings, ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from kvrouter.tools.doctor.base import Found
    from kvrouter.tools.doctor.store import StoreFacts

WIDTH: Final = 100
REQUESTS_PER_CHECK: Final = 6
"""Requests that a check may wait for, one after the other, each with its own deadline."""
REQUESTS_TO_LEARN: Final = 60  # the same of all that is asked before the checks
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
        loss: the largest avoidable loss of prompt tokens, if a router runs with these settings.
    """

    rows: tuple[tuple[str, Finding], ...]
    checks: int
    seconds: float
    subjects: str
    shared: tuple[SharedGroup, ...] = ()
    loss: str = ""

    def exit_code(self, *, strict: bool) -> int:
        """1 if there is an error, or with `strict` a warning; else 0."""
        grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return int(any(finding.severity in grave for _, finding in self.rows))

    def json(self) -> bytes:
        """An object with `findings`, `shared`, `loss`, `checks`, `subjects` and `seconds`."""
        document = {
            "findings": [{"check": check, **asdict(finding)} for check, finding in self.rows],
            "shared": [asdict(group) for group in self.shared],
            "loss": self.loss,
            "checks": self.checks,
            "subjects": self.subjects,
            "seconds": round(self.seconds, 3),
        }
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)

    def text(self) -> str:
        """Paragraphs of at most 100 columns; ends with the counts."""
        parts = [self.loss] if self.loss else []
        parts += [_paragraph(check, finding) for check, finding in self.rows]
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
        learnt = await _findings(_learn(setup), REQUESTS_TO_LEARN * deadline_s)
        limit_s = REQUESTS_PER_CHECK * deadline_s
        found = await asyncio.gather(
            *(_findings(_all(check.examine(setup)), limit_s) for check in checks)
        )
    rows = [("doctor", one) for one in learnt]
    rows += [(check.name, one) for check, each in zip(checks, found, strict=True) for one in each]
    rows.sort(key=lambda row: GRAVEST_FIRST.index(row[1].severity))
    seconds, shared = monotonic() - begun_s, tuple(shared_groups(setup))
    return Report(
        tuple(rows), len(checks), seconds, _subjects(setup), shared, await _loss(settings)
    )


async def _loss(settings: RouterSettings) -> str:
    """What the running router says first of its prompt tokens; "": it does not run."""
    if not settings.control_port:
        return ""
    scheme = "https" if settings.ssl_certfile else "http"
    url = f"{scheme}://{settings.control_host}:{settings.control_port}"
    asked = StatusSettings(url=url, token=settings.admin_token)
    try:
        return (await ask(asked, "/why", "")).decode().partition("\n")[0]
    except UsageError:
        return ""


async def _learn(setup: Setup) -> list[Finding]:
    """Ask engines and the store, try pairs of engines, and ask the store what it saw of that."""
    settings, engines = setup.settings, list[Engine]()
    setup.discovered = await read_sources(setup)
    named = [*settings.engines.items()]
    named += [one for each in setup.discovered for one in each.members.items()]
    for address, role in both_roles(named).items():
        if role is not Role.STORE:
            tls = SECURE in address
            engines.append(Engine(bare_address(address), role, tls=tls, nodes=setup.nodes))
        elif settings.store == settings.store_nodes:  # it is not of another project
            settings.store = unique_stores([*settings.store, address])
    setup.engines = await asyncio.gather(*(learn_engine(setup, each) for each in engines))
    setup.stores = await _ask_nodes(settings)
    if setup.usable_stores:
        setup.trials = await try_pairs(setup)
        setup.stores = await _ask_nodes(settings)
    return []


async def _ask_nodes(settings: RouterSettings) -> list[StoreFacts]:
    return await asyncio.gather(*(learn_store(settings, url) for url in settings.store_nodes))


async def _all(found: Found) -> list[Finding]:
    return [each async for each in found]


async def _findings(work: Awaitable[list[Finding]], deadline_s: float) -> list[Finding]:
    """The findings of some work; if it fails or hangs, a finding that says so."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        sentence = f"this check did not end within {deadline_s:g} s"
        remedy = "see which engine is slow, or raise --doctor-deadline"
    except Exception as failure:  # what one peer answers must not hide findings of others
        log.debug("%s", work, exc_info=True)
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
