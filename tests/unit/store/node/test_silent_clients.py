"""Client processes that are stopped while they hold reservations: what others may do meanwhile."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.fakes.stall import stall
from tests.fakes.stopped_client import BLOCK, MANIFEST
from tests.fakes.store import (
    HASH_BYTES,
    PATIENCE_S,
    ROOT,
    Memory,
    StoreProcess,
    chain_of,
    content_of,
    put_chain,
)

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName

pytestmark = pytest.mark.slow
S = BlockStatus
SLOTS = 64
HELD = SLOTS // 4  # what one client may hold
CHAIN = chain_of(HELD, "a")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(
        unix_path=str(tmp_path / "s.sock"),
        pool_bytes=SLOTS * BLOCK,
        granule_bytes=BLOCK,
        reserve_timeout_s=0.2,
    )
    server.start()
    yield server
    server.stop()


class Holder:
    """A process that reserves blocks of chain "a" and is then stopped by SIGSTOP."""

    def __init__(self, url: str, blocks: int) -> None:
        command = [sys.executable, "-m", "tests.fakes.stopped_client", url, "a", str(blocks)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.statuses = self._read()
        stall(self._process.pid)

    def go_on_and_commit(self) -> list[BlockStatus]:
        """What becomes of its reservations."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)

    def _read(self) -> list[BlockStatus]:
        assert self._process.stdout is not None
        return [BlockStatus(int(word)) for word in self._process.stdout.readline().split()]


@contextmanager
def holder(unix_path: str | None, blocks: int = SLOTS) -> Iterator[Holder]:
    made = Holder(f"kv+unix://{unix_path}", blocks)
    with ExitStack() as stack:
        stack.callback(made.kill)
        yield made


def gauges(server: StoreServer) -> dict[str, int]:
    names = ("reserved_blocks", "fenced_blocks", "fenced_bytes", "used_bytes", "lent_bytes")
    stats = server.stats()
    return {name: stats[name] for name in names if stats[name]}


def reads_right(client: StoreClient, hashes: bytes) -> bool:
    """Whether all blocks are there; fails where one has other bytes than its own."""
    blocks = len(hashes) // HASH_BYTES
    memory = Memory(blocks, BLOCK)
    got = client.get_into(MANIFEST, 0, hashes, range(blocks), memory.segments, range(blocks))
    for k in range(got.count(S.OK)):
        assert memory[k] == content_of(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES], BLOCK)
    return got == [S.OK] * blocks


def test_others_use_the_pool_and_write_the_same_blocks_while_a_client_is_stopped(
    node: StoreServer,
) -> None:
    with (
        holder(node.unix_path) as stopped,
        StoreClient(f"kv://127.0.0.1:{node.port}", transport="shm") as client,
    ):
        assert stopped.statuses == [S.GRANTED] * HELD + [S.NO_SPACE] * (SLOTS - HELD)
        assert put_chain(client, MANIFEST, chain_of(HELD, "b")) == HELD
        assert eventually(lambda: node.stats()["expired_reservations_total"] == HELD)
        assert node.stats()["fenced_bytes"] == HELD * BLOCK
        assert put_chain(client, MANIFEST, CHAIN) == HELD
        # All slots but the fenced ones are used again and again.
        for k in range(20):
            assert put_chain(client, MANIFEST, chain_of(HELD, f"more {k}")) == HELD
        put_chain(client, MANIFEST, CHAIN)
        assert stopped.go_on_and_commit() == [S.GONE] * HELD
        assert node.stats()["fenced_blocks"] == node.stats()["fenced_bytes"] == 0
        assert reads_right(client, CHAIN)
        for k in range(20):
            reads_right(client, chain_of(HELD, f"more {k}"))
    assert eventually(lambda: node.stats()["connections"] == 0)
    node.purge()
    assert eventually(lambda: not gauges(node))


def test_a_stopped_client_that_is_killed_leaves_nothing(node: StoreServer) -> None:
    with holder(node.unix_path) as stopped:
        assert eventually(lambda: node.stats()["expired_reservations_total"] == HELD)
        assert gauges(node)["fenced_blocks"] == HELD
        stopped.kill()
        assert eventually(lambda: not gauges(node))
    assert node.stats()["free_bytes"] == SLOTS * BLOCK


def test_the_bounds_are_settings_of_the_node(tmp_path: Path) -> None:
    bounds = ("--reserve-limit", "48KiB", "--reserve-timeout", "0.2")
    with (
        StoreProcess(tmp_path, "1MiB", *bounds, "--granule", "16KiB") as node,
        holder(node.unix_path) as stopped,
        StoreClient(node.url) as client,
    ):
        assert stopped.statuses.count(S.GRANTED) == 3
        assert eventually(lambda: client.stats()["expired_reservations_total"] == 3)
        assert client.stats()["client_limited_total"] == 1


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_put_larger_than_what_one_client_may_hold_is_stored_whole(
    node: StoreServer, transport: TransportName
) -> None:
    chain = chain_of(3 * HELD, "large")
    with StoreClient(f"kv://127.0.0.1:{node.port}", transport=transport) as client:
        assert put_chain(client, MANIFEST, chain) == 3 * HELD
        assert put_chain(client, MANIFEST, chain) == 0
        assert reads_right(client, chain)
