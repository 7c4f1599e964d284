"""Runs the doctor's checks, all at once, each with a deadline: what hangs holds nothing else up."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import uvloop

from kvrouter.credentials.engine_keys import WorkerKeys
from kvrouter.credentials.tls import Trust
from kvrouter.engines.engine import Engine
from kvrouter.engines.families import Families
from kvrouter.membership.discovery.base import both_roles
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.options.addresses import SECURE, bare_address
from kvrouter.tools.doctor.base import GRAVEST_FIRST, Host, Once, SetUp, error
from kvrouter.tools.doctor.engine_facts import learn_engine
from kvrouter.tools.doctor.registry import CHECKS
from kvrouter.tools.doctor.report import Report
from kvrouter.tools.doctor.sources import read_sources
from kvrouter.tools.doctor.store_facts import learn_store
from kvrouter.tools.doctor.trials import try_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrouter.app.settings import RouterSettings
    from kvrouter.tools.doctor.base import Check, Finding
    from kvrouter.tools.doctor.settings import DoctorSettings

REQUESTS_PER_CHECK: Final = 6
"""Requests that a check may have to wait for, one after the other, each with its own deadline."""

log = logging.getLogger(__name__)


async def examine(
    settings: RouterSettings,
    host: Host = Host(),  # noqa: B008 (immutable)
    *,
    deadline_s: float = 20.0,
    checks: Sequence[Check] = CHECKS,
) -> Report:
    """Make all `checks` of a router's set-up.

    Args:
        settings: of the router.
        host: the machine that this runs on.
        deadline_s: seconds that an engine may take for one request.
        checks: those to make.
    """
    begun_s = monotonic()
    keys, trust = WorkerKeys(settings.engine_keys()), Trust(settings.engine_ca_file)
    async with ProbeClient(keys, trust) as asker:
        setup = SetUp(settings, host, Families(), asker, deadline_s)
        setup.sourced = await read_sources(settings)
        said = [*settings.engines.items()]
        said += [one for each in setup.sourced for one in each.members.items()]
        for address, role in both_roles(said).items():
            engine = Engine(bare_address(address), role, tls=address.startswith(SECURE))
            setup.engines[address] = Once(partial(learn_engine, setup, engine))
        if settings.store is not None:
            setup.store = Once(partial(learn_store, settings))
            setup.settled = Once(partial(learn_store, settings))
        setup.trials = Once(partial(try_pairs, setup))
        try:
            found = await asyncio.gather(*(_made(check, setup) for check in checks))
        finally:
            await setup.close()
    rows = [(check.name, one) for check, each in zip(checks, found, strict=True) for one in each]
    rows.sort(key=lambda row: GRAVEST_FIRST.index(row[1].severity))
    return Report(tuple(rows), len(checks), monotonic() - begun_s, _subjects(setup))


async def _made(check: Check, setup: SetUp) -> list[Finding]:
    """One check's findings; that it fails or hangs is one."""
    deadline_s = REQUESTS_PER_CHECK * setup.deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            return [found async for found in check.examine(setup)]
    except TimeoutError:
        sentence = f"this check did not end within {deadline_s:g} s"
        remedy = "see which engine is slow, or raise --doctor-deadline"
    except Exception as failure:  # whatever a peer answers must not hide what others answer
        log.debug("check %s", check.name, exc_info=True)
        sentence = f"this check failed: {failure!r}"
        remedy = "report this sentence: it is a defect of the doctor"
    return [error("kvrouter doctor", sentence, remedy)]


def _subjects(setup: SetUp) -> str:
    settings, engines = setup.settings, len(setup.engines)
    named = [f"{engines} engine{'' if engines == 1 else 's'}"] if engines else []
    named += [f"the store at {settings.store}"] if settings.store is not None else []
    return ", ".join([*named, "this host"])


def run(settings: DoctorSettings) -> int:
    """Examine, print what was found; the exit code: 1 for errors, with --strict for warnings."""
    logging.getLogger().addHandler(logging.NullHandler())  # findings say what matters
    host = Host(settings.host_root)
    report = uvloop.run(examine(settings, host, deadline_s=settings.doctor_deadline_s))
    shown = report.json().decode() + "\n" if settings.json_output else report.text()
    sys.stdout.write(shown)
    sys.stdout.flush()
    return report.exit_code(strict=settings.strict)
