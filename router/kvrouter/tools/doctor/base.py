"""The seam of the doctor's checks: what a check is, what it finds, what it looks at.

Checks only look: what they do to an engine or a store is undone, or is what any client does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvrouter_store.node.placement import Read, reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from kvrouter.app.settings import RouterSettings
    from kvrouter.engines.families import Families
    from kvrouter.membership.probe_client import ProbeClient
    from kvrouter.tools.doctor.engine_facts import EngineFacts
    from kvrouter.tools.doctor.sources import Sourced
    from kvrouter.tools.doctor.store_facts import StoreFacts
    from kvrouter.tools.doctor.trials import Trial

    Found = AsyncIterator["Finding"]
    """What is wrong with one thing; nothing where there is nothing to look at."""

T = TypeVar("T")


class Severity(StrEnum):
    """How much a finding matters: requests fail or are wrong, are at risk, could go better."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


GRAVEST_FIRST: Final = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        severity: how much it matters.
        subject: what it is about: engines by their address, the store by its URL, or this host.
        finding: what was seen, in a sentence.
        remedy: what to do about it, in a sentence.
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
    """One check.

    Attributes:
        name: as findings name it, also for scripts.
        looks_at: what it sees to, for docs/doctor-checks.md.
        examine: yields what is wrong; never raises for it.
    """

    name: str
    looks_at: str
    examine: Callable[[SetUp], Found]


class Once(Generic[T]):
    """What several checks want to know and one of them learns: a coroutine that runs once."""

    def __init__(self, learn: Callable[[], Coroutine[object, object, T]]) -> None:
        self._learn = learn
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """What it returned or raised; who gives up waiting ends it for nobody else."""
        if self._task is None:
            self._task = asyncio.create_task(self._learn())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Stop it, if it was begun and has not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the doctor runs on, through what tests can plant.

    Attributes:
        root: folder under which `/proc`, `/sys` and `/dev` are looked for.
        clock: seconds since 1970.
        limit: soft limit of a resource, by its number in `resource`.
    """

    root: Path = Path("/")
    clock: Callable[[], float] = time.time
    limit: Callable[[int], int] = lambda number: resource.getrlimit(number)[0]

    @property
    def read(self) -> Read:
        """Reads files by their path; "" for one that cannot be read."""
        return reader(self.root)

    @property
    def sysfs_rdma(self) -> Path:
        """Where RDMA devices are."""
        return self.root / "sys/class/infiniband"

    def shm_free_bytes(self) -> int | None:
        """What `/dev/shm` has left; None where there is none."""
        try:
            found = os.statvfs(self.root / "dev/shm")
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


@dataclass(slots=True)
class SetUp:
    """What is examined. One per run of the doctor; checks share what one of them learnt.

    Attributes:
        settings: of the router that is to run in front of it.
        host: this machine.
        families: every family.
        asker: asks engines.
        deadline_s: seconds that an engine may take for one request of the doctor's.
        engines: what is known of each engine, by its address.
        store: what is known of the store; None where none is named.
        settled: the same after the trials: see `the_settled_store`.
        sourced: what each source of engines said, beside flags.
        trials: what became of a prompt through pairs of engines.
    """

    settings: RouterSettings
    host: Host
    families: Families
    asker: ProbeClient
    deadline_s: float
    sourced: list[Sourced] = field(default_factory=list)
    engines: dict[str, Once[EngineFacts]] = field(default_factory=dict)
    store: Once[StoreFacts] | None = None
    settled: Once[StoreFacts] | None = None
    trials: Once[list[Trial]] | None = None

    async def all_engines(self) -> list[EngineFacts]:
        """What is known of every engine, dead ones included."""
        return list(await asyncio.gather(*(each.get() for each in self.engines.values())))

    async def known_engines(self) -> list[EngineFacts]:
        """What is known of the engines that said who they are."""
        return [each for each in await self.all_engines() if each.engine.identity is not None]

    async def generating_engines(self) -> list[EngineFacts]:
        """Those of them that generate text: the others only embed or score, and share no KV."""
        known = await self.known_engines()
        return [e for e in known if e.engine.identity is not None and e.engine.identity.generates]

    async def the_store(self) -> StoreFacts | None:
        """What is known of the store; None where none is named, or it cannot be used."""
        return await _usable(self.store)

    async def the_settled_store(self) -> StoreFacts | None:
        """The same after the trials, before which engines get time to connect to the store."""
        if self.trials is not None:
            await self.trials.get()
        return await _usable(self.settled)

    async def close(self) -> None:
        """Stop what is still being learnt."""
        for each in (*self.engines.values(), self.store, self.settled, self.trials):
            if each is not None:
                await each.close()


async def _usable(store: Once[StoreFacts] | None) -> StoreFacts | None:
    facts = await store.get() if store is not None else None
    return facts if facts is not None and facts.error is None else None
