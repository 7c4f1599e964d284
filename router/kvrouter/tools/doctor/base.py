"""What a check of the doctor is, what it finds, and what it can look at.

A check undoes what it does to an engine or a store, or does only what any client does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvrouter.engines.families.pages import ProbeFailed
from kvrouter_store.free_memory import Read, reader

if TYPE_CHECKING:
    from asyncio import Future

    from kvrouter.app.settings import RouterSettings
    from kvrouter.engines.engine import Engine
    from kvrouter.engines.families import Families
    from kvrouter.membership.probe_client import ProbeClient
    from kvrouter.tools.doctor.discovery import FirstMembers
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter.tools.doctor.store_facts import StoreFacts
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
class SharedGroup:
    """A cache group that an engine shares through the store.

    Attributes:
        engine: by role and address.
        group: the kind of attention, and the group's number in the engine.
        reach: how many trailing blocks of a prefix a hit needs; None: all.
    """

    engine: str
    group: str
    reach: int | None

    def __str__(self) -> str:
        """A line for operators."""
        needed = "all blocks" if self.reach is None else f"the last {self.reach} blocks"
        return f"{self.engine} shares {self.group}: a hit needs {needed}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        severity: how much it matters.
        subject: engines by role and address, the store by its URL, or this host.
        finding: what the doctor saw, in a sentence.
        remedy: what the operator can do, in a sentence.
    """

    severity: Severity
    subject: str
    finding: str
    remedy: str


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


def each_node(examine: Callable[[Setup, StoreFacts], Found]) -> Callable[[Setup], Found]:
    """A check of each node of the store that can be used, before the trials."""

    @wraps(examine)
    async def check(setup: Setup) -> Found:
        for store in await setup.usable_stores():
            async for found in examine(setup, store):
                yield found

    return check


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the doctor runs on; tests plant faults here.

    Attributes:
        root: folder that contains `/proc`, `/sys` and `/dev`.
        clock: seconds since 1970.
        limit: soft limit of a resource by its number in `resource`; of open files the hard one.
    """

    root: Path = Path("/")
    clock: Callable[[], float] = time.time
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
            found = os.statvfs(self.root / "dev/shm")
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


@dataclass(slots=True)
class Setup:
    """What one run of the doctor examines. Checks share the facts.

    Attributes:
        settings: of the router that is to serve these engines.
        probe: asks engines.
        deadline_s: seconds that an engine may take for one request of the doctor.
        bootstrap_ports, nodes: see `SourceContext`.
        discovered: the first members that each discovery source named.
        engines: facts of each engine, by its address.
        stores: facts of each node of the store.
        later_stores: the same after the trials.
        trials: results of a prompt through pairs of engines.
    """

    settings: RouterSettings
    host: Host
    families: Families
    probe: ProbeClient
    deadline_s: float
    bootstrap_ports: ChainMap[str, int] = field(default_factory=ChainMap)
    nodes: ChainMap[str, str] = field(default_factory=ChainMap)
    discovered: list[FirstMembers] = field(default_factory=list)
    engines: dict[str, Future[EngineFacts]] = field(default_factory=dict)
    stores: list[Future[StoreFacts]] = field(default_factory=list)
    later_stores: list[Future[StoreFacts]] = field(default_factory=list)
    trials: Future[list[Trial]] | None = None

    async def ask(self, engine: Engine, path: str, body: bytes | None = None) -> bytes | None:
        """The body of an engine's 200 to a GET, or with `body` to a POST; None if there is none."""
        try:
            return (await self.probe.ask(engine, path, body, self.patience_s(body))).body
        except ProbeFailed:
            return None

    def patience_s(self, body: bytes | None) -> float:
        """Seconds that an engine may take: more for a request with a body, which may wait."""
        return self.settings.health_timeout_s if body is None else self.deadline_s

    async def all_engines(self) -> list[EngineFacts]:
        """Every engine, including those that do not answer."""
        return list(await asyncio.gather(*map(asyncio.shield, self.engines.values())))

    async def known_engines(self) -> list[EngineFacts]:
        """The engines that could be identified."""
        return [each for each in await self.all_engines() if each.engine.identity is not None]

    async def generating_engines(self) -> list[EngineFacts]:
        """The identified engines that generate text. Others embed or score, and share no KV."""
        known = await self.known_engines()
        return [e for e in known if e.engine.identity is not None and e.engine.identity.generates]

    async def all_stores(self, *, after_trials: bool = False) -> list[StoreFacts]:
        """Every node of the store, including those that cannot be used."""
        stores = self.later_stores if after_trials else self.stores
        return list(await asyncio.gather(*map(asyncio.shield, stores)))

    async def usable_stores(self, *, after_trials: bool = False) -> list[StoreFacts]:
        """The nodes of the store that can be used."""
        known = await self.all_stores(after_trials=after_trials)
        return [each for each in known if each.error is None]

    async def all_trials(self) -> list[Trial]:
        """Results of all trials; empty without a store."""
        return await asyncio.shield(self.trials) if self.trials is not None else []

    async def close(self) -> None:
        """Stop what still runs."""
        stores = (*self.stores, *self.later_stores)
        running = [each for each in (*self.engines.values(), *stores, self.trials) if each]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
