"""Clients of other projects, each in an environment of its own, before one fleet."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tests.clients.client import Client, Script
from tests.clients.fleet import Fleet, started


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The servers of all tests."""
    with started(tmp_path_factory.mktemp("fleet")) as found:
        yield found


@dataclass
class Pair:
    """One client before an engine alone, and before the router."""

    script: Script
    fleet: Fleet
    straight: Client
    routed: Client
    landed_before: float

    def do(self, step: str) -> Any:
        """What a step returns through the router. Before the engine alone it must be the same."""
        alone = self.straight.do(step)
        routed = self.routed.do(step)
        assert routed == alone
        return routed


@pytest.fixture(scope="module")
def client(
    request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """The client that the test is run for."""
    script: Script = request.param
    folder = tmp_path_factory.mktemp(script.name)
    program = script.command(folder)
    with ExitStack() as cleanup:
        clients = []
        for name, url in (("straight", fleet.alone.url), ("routed", fleet.router.url)):
            log = cleanup.enter_context((folder / f"{name}.log").open("w"))
            clients.append(Client(program, url, log))
            cleanup.callback(clients[-1].close)
        yield Pair(script, fleet, clients[0], clients[1], fleet.landed())
