"""Each call on the files of the SSD tier fails, in turn: what counts as durable is there after it.

Behind a sync that failed the fake disk loses what was not synced, as Linux may.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.disk import DISK, MANIFEST, DiskNode, read
from tests.fakes.faulty_disk import FaultyDisk, built
from tests.fakes.patience import eventually
from tests.fakes.store import chain_of, put_chain
from tests.unit.store.node.test_disk_start import run_store

from kvrouter_store.client.blocking import StoreClient

pytestmark = pytest.mark.slow
Start = Callable[..., DiskNode]
BLOCKS = 8
ERRORS = ("EIO", "ENOSPC", "EDQUOT")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("faulty-disk"))


@pytest.fixture
def disk(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    made = FaultyDisk(library, tmp_path / "told")
    made.use(monkeypatch)
    return made


class Chains:
    """Chains that were put into a node, and those of them that a flush called durable."""

    def __init__(self, disk: FaultyDisk, start: Start) -> None:
        self._disk = disk
        self._start = start
        self.node = start("--disk-io", "threads")
        self._put: list[bytes] = []
        self._durable: list[bytes] = []

    def put(self) -> None:
        hashes = chain_of(BLOCKS, f"chain {len(self._put)}")
        with StoreClient(self.node.url) as client:
            assert put_chain(client, MANIFEST, hashes) == BLOCKS
        self._put.append(hashes)

    def flush(self) -> tuple[int, str]:
        """The status, and what it says."""
        status, told = self.node.ask("/flush", "POST")
        if status == 200:
            self._durable = list(self._put)
        return status, str(told)

    def check(self) -> None:
        """After `kill -9`, all that was called durable is there, and is as it was put."""
        self.node.kill()
        self._disk.heal()
        self.node = self._start("--disk-io", "threads")
        with StoreClient(self.node.url) as client:
            assert [read(client, hashes) for hashes in self._durable] == [BLOCKS] * len(
                self._durable
            )


@pytest.fixture
def chains(disk: FaultyDisk, start_over_disk: Start) -> Chains:
    made = Chains(disk, start_over_disk)
    made.put()
    assert made.flush()[0] == 200
    return made


@pytest.mark.parametrize(
    ("call", "error", "first"),
    [
        *[("fdatasync", "EIO", first) for first in (1, 2, 3)],  # of blocks, and of the index
        *[(call, error, 1) for call in ("pwrite", "write") for error in ERRORS],
        ("fdatasync", "ENOSPC", 1),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_flush_called_durable_is_there_whatever_failed_once(  # noqa: PLR0917
    chains: Chains, disk: FaultyDisk, call: str, error: str, first: int, goes_on: bool
) -> None:
    """Where it `goes_on`, the disk is used again, and what was given up is written again."""
    disk.fail(call, error, first)
    chains.put()
    status, told = chains.flush()
    assert status == 200 or "not everything is durable" in told
    if goes_on:
        assert eventually(lambda: chains.node.stat("disk_bypassed") == 0)
        assert chains.flush()[0] == 200
        assert (first > 1) or chains.node.stat("disk_errors_total") == 1
    chains.check()


@pytest.mark.parametrize("call", ["pwrite", "write"])
def test_a_short_write_is_continued(chains: Chains, disk: FaultyDisk, call: str) -> None:
    disk.fail(call, "short", 1, 3)
    chains.put()
    assert chains.flush()[0] == 200
    assert chains.node.stat("disk_errors_total") == 0
    chains.check()


def test_a_disk_that_cannot_sync_stays_aside_until_it_can(chains: Chains, disk: FaultyDisk) -> None:
    disk.fail("fdatasync", "EIO", 1, 1000)
    chains.put()
    assert chains.flush()[0] == 503
    assert chains.node.stat("disk_bypassed.sync_errors") == 1
    assert eventually(lambda: chains.node.stat("disk_errors_total.sync") >= 1)
    chains.put()
    status, told = chains.flush()
    assert (status, "bypassed: sync_errors" in told) == (503, True)
    disk.heal()
    assert eventually(lambda: chains.node.stat("disk_bypassed") == 0)
    assert chains.node.says("is used again after")
    assert chains.flush()[0] == 200
    chains.check()


@pytest.mark.parametrize("call", ["rename", "fsync", "write", "fdatasync"])
def test_an_index_that_cannot_be_replaced_keeps_the_disk_aside(
    chains: Chains, disk: FaultyDisk, call: str
) -> None:
    """`fsync` is of the folder, after the rename."""
    disk.fail("write", "EIO")
    chains.put()
    assert chains.flush()[0] == 503
    disk.fail(call, "EIO", 2 if call == "fdatasync" else 1)  # the first one is of the trial's page
    assert eventually(lambda: chains.node.stat("disk_bypassed") == 0)
    assert chains.flush()[0] == 200
    chains.check()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *[(call, "EIO") for call in ("pwrite", "fdatasync", "fsync", "write", "rename", "unlink")],
        *[("fallocate", error) for error in ERRORS],
    ],
)
def test_a_disk_that_cannot_be_opened_is_one_sentence(
    disk: FaultyDisk, tmp_path: Path, call: str, error: str
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "kvstore.journal.new").touch()  # a crash left it, to be removed
    flags = ["--disk", str(folder), "--disk-size", DISK, "--disk-io", "threads"]
    disk.fail(call, error, 1, 1000)
    done = run_store(tmp_path, *flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert ("has no room for" in done.stderr) is (error != "EIO")
    disk.heal()
    with DiskNode(tmp_path, "--disk-io", "threads") as node:
        assert node.flush() == 0


@pytest.mark.parametrize("call", ["ftruncate", "fdatasync"])
def test_a_torn_index_that_cannot_be_mended_is_not_used(
    chains: Chains, disk: FaultyDisk, tmp_path: Path, call: str
) -> None:
    chains.node.kill()
    with (tmp_path / "disk" / "kvstore.journal").open("ab") as journal:
        journal.write(b"torn")
    disk.fail(call, "EIO", 1, 1000)
    flags = ["--disk", str(tmp_path / "disk"), "--disk-size", DISK, "--disk-io", "threads"]
    done = run_store(tmp_path, *flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    disk.heal()
    chains.check()
