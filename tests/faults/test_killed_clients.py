"""A client killed at every step of put and get: nothing of it stays, no byte is wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.doomed_client import BLOCK, BLOCKS, CHAIN, MANIFEST
from tests.fakes.gauges import assert_gauges_return, held
from tests.fakes.store import Memory, chain_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 30
pytestmark = pytest.mark.timeout(300)  # dozens of processes, one after the other
TRANSPORTS = ("shm", "unix", "tcp")


def start(url: str, transport: str, operation: str, step: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.fakes.doomed_client", url, transport, operation]
    return subprocess.Popen([*command, str(step)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def steps_of(url: str, transport: str, operation: str) -> int:
    """How many steps the operation has: counted on a client that is left alone."""
    output, _ = start(url, transport, operation, -1).communicate(timeout=PATIENCE_S)
    lines = output.splitlines()
    assert lines[-1] == "done"
    return len(lines) - 1


def kill_at(url: str, transport: str, operation: str, step: int) -> str:
    """Kill -9 a client that has come to the step; the step's name."""
    process = start(url, transport, operation, step)
    assert process.stdout is not None
    name = process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    process.stdout.close()
    return name


@pytest.mark.parametrize(
    ("transport", "lend_bytes"), [*((name, 0) for name in TRANSPORTS), ("shm", 1 << 20)]
)
def test_a_client_killed_at_any_step_of_a_put(
    server: StoreServer, url: str, transport: str, lend_bytes: int
) -> None:
    with StoreClient(url, transport="tcp") as client:
        client.register(MANIFEST)
        steps = steps_of(url, transport, "put")
        assert steps >= (6 if lend_bytes else 7)
        client.purge()
        before = held(server)
        for step in range(steps):
            assert kill_at(url, transport, "put", step).startswith(f"step {step} ")
            assert_gauges_return(server, before)
            whole = client.match(MANIFEST, CHAIN).blocks
            blockwise = lend_bytes or transport != "shm"  # committed one by one
            assert blockwise or whole in (0, BLOCKS)
            assert_all_is_right(client, whole)
            put_chain(client, MANIFEST, CHAIN)
            assert_all_is_right(client)
            client.purge()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_killed_at_any_step_of_a_get(
    server: StoreServer, url: str, transport: str
) -> None:
    with StoreClient(url, transport="tcp") as client:
        put_chain(client, MANIFEST, CHAIN)
        steps = steps_of(url, transport, "get")
        assert steps >= 7
        before = held(server)
        for step in range(steps):
            assert kill_at(url, transport, "get", step).startswith(f"step {step} ")
            assert_gauges_return(server, before)
        assert_all_is_right(client)
        put_chain(client, MANIFEST, chain_of(BLOCKS, "another"))
        assert client.purge() == 2 * BLOCKS


def assert_all_is_right(client: StoreClient, blocks: int = BLOCKS) -> None:
    memory = Memory(BLOCKS, BLOCK)
    span = range(blocks)
    got = client.get_into(MANIFEST, 0, CHAIN, span, memory.segments, span)
    assert got == [BlockStatus.OK] * blocks
    right = Memory(BLOCKS, BLOCK).holds(CHAIN)
    assert memory.data[: blocks * BLOCK] == right.data[: blocks * BLOCK]
