"""What a check of the doctor is, what it finds, and what it can look at.

A check undoes what it does to an engine or a store, or does only what any client does.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families.pages import ProbeFailed
from kvrouter_store.free_memory import Read, reader

if TYPE_CHECKING:
    from kvrouter.app.settings import RouterSettings
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.membership.discovery.follow import SourceStatus
    from kvrouter.membership.probe_client import ProbeClient, ProbeResponse
    from kvrouter.tools.doctor.engines import EngineFacts
    from kvrouter.tools.doctor.store import StoreFacts
    from kvrouter.tools.doctor.trials import Trial

Found = AsyncIterator["Finding"]
"""What is wrong with one topic; empty if there is nothing to look at."""


class Severity(StrEnum):
    """Requests fail or are wrong; will probably fail later; could be faster."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


GRAVEST_FIRST: Final = tuple(Severity)
_FILES: Final = resource.RLIMIT_NOFILE


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity  # how much it matters
    subject: str  # engines by role and address, the store by its URL, or this host
    finding: str  # what the doctor saw, in a sentence
    remedy: str  # what the operator can do, in a sentence


error: Final = partial(Finding, Severity.ERROR)
warning: Final = partial(Finding, Severity.WARNING)
remark: Final = partial(Finding, Severity.INFO)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name in findings, and what it ensures, for docs/doctor-checks.md.

    `examine` yields findings and never raises for them.
    """

    name: str
    ensures: str
    examine: Callable[[Setup], Found]


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the doctor runs on; tests plant faults here."""

    root: Path = Path("/")  # folder that contains `/proc`, `/sys` and `/dev`
    clock: Callable[[], float] = time.time  # seconds since 1970
    # Soft limit of a resource by its number in `resource`; of open files the hard one.
    limit: Callable[[int], int] = lambda number: resource.getrlimit(number)[number == _FILES]

    @property
    def read(self) -> Read:
        """Reads files by their path; "" for one that cannot be read."""
        return reader(self.root)

    @property
    def sysfs_rdma(self) -> Path:
        """The folder of RDMA devices."""
        return self.root / "sys/class/infiniband"

    @property
    def has_rdma(self) -> bool:
        """Whether there is an RDMA device."""
        return self.sysfs_rdma.is_dir() and any(self.sysfs_rdma.iterdir())

    def shm_free_bytes(self) -> int | None:
        """Free bytes of `/dev/shm`; None if there is none."""
        try:
            return shutil.disk_usage(self.root / "dev/shm").free
        except OSError:
            return None


@dataclass(slots=True)
class Setup:
    """What one run of the doctor examines. Checks share the facts."""

    settings: RouterSettings  # of the router that is to serve these engines
    host: Host
    families: Families
    probe: ProbeClient  # asks engines
    deadline_s: float  # seconds that an engine may take for one request of the doctor
    bootstrap_ports: ChainMap[str, int] = field(default_factory=ChainMap)  # see `SourceContext`
    nodes: ChainMap[str, str] = field(default_factory=ChainMap)  # the same
    # The first members that each discovery source named.
    discovered: list[SourceStatus] = field(default_factory=list)
    # Facts of each engine, also of those that do not answer.
    engines: list[EngineFacts] = field(default_factory=list)
    # Results of a prompt through pairs of engines.
    trials: list[Trial] = field(default_factory=list)
    # Facts of each node of the store after the trials, also of those that do not answer.
    stores: list[StoreFacts] = field(default_factory=list)

    async def ask(self, engine: Engine, path: str, body: bytes | None = None) -> bytes | None:
        """The body of an engine's 200 to a GET, or with `body` to a POST; None if there is none."""
        try:
            return (await self.answer(engine, path, body)).body
        except ProbeFailed:
            return None

    async def answer(self, engine: Engine, path: str, body: bytes | None) -> ProbeResponse:
        """The same, or ProbeFailed. A request with a body may wait, and so may take longer."""
        deadline_s = self.settings.health_timeout_s if body is None else self.deadline_s
        return await self.probe.ask(engine, path, body, deadline_s)

    @property
    def known_engines(self) -> list[EngineFacts]:
        """The engines that could be identified."""
        return [each for each in self.engines if each.engine.identity is not None]

    @property
    def generating_engines(self) -> list[EngineFacts]:
        """The identified engines that generate text. Others embed or score, and share no KV."""
        return [each for each in self.known_engines if each.identity.generates]

    @property
    def usable_stores(self) -> list[StoreFacts]:
        """The nodes of the store that can be used."""
        return [each for each in self.stores if each.error is None]
