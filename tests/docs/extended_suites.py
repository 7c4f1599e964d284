"""A pytest plugin: what the suites of docs/extend.md need to test its four examples."""

import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from tests.fakes import discovery
from tests.fakes.discovery import Backend
from tests.fakes.pd import PlainEngine, Routed

from kvrouter.engines.engine import Role
from kvrouter.http.server.exchange import Exchange
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import EngineSource


class LlamaCppEngine(PlainEngine):
    """A plain server, but for the owner of its models and its /health."""

    family: ClassVar[str] = "llamacpp"
    owner: ClassVar[str] = "llamacpp"

    def routes(self) -> Routed:
        return [*super().routes(), ("GET", "/health", self.health)]

    async def health(self, exchange: Exchange) -> None:
        exchange.respond(200)


class LinesBackend:
    """A file that is replaced as a whole."""

    roles = (Role.PREFILL, Role.DECODE)
    more: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self._path = folder / "engines.txt"
        self._text = ""
        self.setting = f"lines://{self._path}"

    def source(self) -> EngineSource:
        return make_source(self.setting)

    async def name(self, members: Mapping[str, Role]) -> None:
        self._text = "".join(f"{role.value} {address}\n" for address, role in members.items())
        await self.mend()

    async def fail(self) -> None:
        self._path.unlink(missing_ok=True)

    async def mend(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(self._text)
        os.replace(fresh, self._path)


@pytest.fixture
def process() -> SimpleNamespace:
    """The server of a tier that has none."""
    return SimpleNamespace(url="process://")


@asynccontextmanager
async def backend_of(kind: str, folder: Path, port: int = 8000) -> AsyncIterator[Backend]:
    made = LinesBackend(folder)
    await made.name({})
    yield made


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before the suites read any of this."""
    from tests.contract.families import conftest as families
    from tests.integration.tiers import conftest as tiers

    lines = importlib.import_module("kvrouter.membership.discovery.lines")
    lines.LOOK_S = 0.02  # type: ignore[attr-defined]
    families.KINDS[LlamaCppEngine.family] = LlamaCppEngine
    tiers.TIERS.append("process")
    discovery.KINDS = (*discovery.KINDS, "lines")
    discovery.backend_of = backend_of
