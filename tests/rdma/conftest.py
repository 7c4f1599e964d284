"""What the tests on a real RDMA device need. `make rdma` brings one; elsewhere they are skipped."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fakes.infinistore import InfiniStore
from tests.rdma.near import LARGE, NearSide
from tests.rdma.rig import Control

from kvrouter_store.rdma.base import Device, RdmaUnavailable
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.options import RdmaOptions

ROOT = Path(__file__).resolve().parent.parent.parent
# Where a second machine's peer listens, as HOST:PORT. `make rdma` sets it: nothing is skipped then.
BESIDE = os.environ.get("KVROUTER_RDMA_BESIDE", "")
# The same of tests.rdma.beside, which does there what tests ask for.
HANDS = os.environ.get("KVROUTER_RDMA_HANDS", "")


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The machine's RDMA device."""
    try:
        opened = open_device(RdmaOptions())
    except RdmaUnavailable as problem:
        if BESIDE:
            raise
        pytest.skip(f"{problem} (make rdma brings one)")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def peer_here() -> Iterator[tuple[str, int]]:
    """A peer on this machine."""
    command = [sys.executable, "-m", "tests.rdma.peer", "127.0.0.1", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield "127.0.0.1", int(process.stdout.readline())
        process.kill()


@pytest.fixture(scope="session")
def peer_beside() -> tuple[str, int]:
    """A peer on the other machine."""
    if not BESIDE:
        pytest.skip("there is no second machine (make rdma brings one)")
    host, _, port = BESIDE.partition(":")
    return host, int(port)


@pytest.fixture(params=["here", "beside"])
def peer(request: pytest.FixtureRequest, device: Device) -> tuple[str, int]:
    """Where the far side listens: on this machine, and on another."""
    found: tuple[str, int] = request.getfixturevalue(f"peer_{request.param}")
    return found


@pytest.fixture
def control(peer: tuple[str, int]) -> Iterator[Control]:
    """A connection to a process of its own at the far side."""
    made = Control(socket.create_connection(peer))
    yield made
    made.close()


@pytest.fixture
def near(device: Device, control: Control) -> Iterator[NearSide]:
    """A queue pair that is connected to the far side, and memory on both."""
    side = NearSide(device, control)
    yield side
    side.close()


@pytest.fixture
def large(device: Device, control: Control) -> Iterator[NearSide]:
    """The same with memory that takes a while to copy."""
    side = NearSide(device, control, size=LARGE)
    yield side
    side.close()


@pytest.fixture(scope="module")
def hands() -> Iterator[Callable[[], Control]]:
    """Connects to the other machine, which does what is asked; what runs there ends with this."""
    if not HANDS:
        pytest.skip("there is no second machine (make rdma brings one)")
    host, _, port = HANDS.partition(":")
    with ExitStack() as connections:

        def connect() -> Control:
            link = socket.create_connection((host, int(port)))
            return connections.enter_context(closing(Control(link)))

        yield connect


@pytest.fixture(scope="session")
def infinistore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InfiniStore]:
    """One server for all tests, which runs when each of them begins."""
    if not HANDS or find_spec("infinistore") is None:
        pytest.skip("there is no InfiniStore (make rdma brings it)")
    with InfiniStore(tmp_path_factory.mktemp("infinistore"), "10.77.0.1") as server:
        yield server
