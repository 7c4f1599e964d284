"""The memory of real nodes on this host: which pages they and their clients have, to the page.

What this host does not give is skipped with the reason. Huge pages are set aside for a moment where
the tests may do that, and given back.
"""

import contextlib
import json
import mmap
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import (
    HASH_BYTES,
    RUN,
    Memory,
    StoreProcess,
    chain_of,
    content_of,
    manifest_of,
)

from kvrouter_store._core import Placement, StoreServer, current_numa_node
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.free_memory import reader
from kvrouter_store.node.placement import plan

pytestmark = pytest.mark.slow
KIB = 1 << 10
MIB = 1 << 20
HUGE = 2 * MIB
BLOCKS = 32
MANIFEST = manifest_of(MIB)
SETTING = Path("/proc/sys/vm/nr_hugepages")
HUGETLB = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
SET_ASIDE = 64
MAP_HUGETLB = 0x40000


def pages_of(pid: int | str, field: str) -> int:
    """Bytes that smaps says of all mappings of pools in a process."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            inside = "kvstore-pool" in rest
        elif inside and name == f"{field}:":
            total += int(rest.split()[0]) * KIB
    return total


def faults() -> int:
    """Page faults of this thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def stats_of(node: StoreProcess) -> dict[str, int]:
    with urllib.request.urlopen(f"{node.http_url}/stats") as answer:
        stats: dict[str, int] = json.load(answer)
    return stats


def put_and_get_back(client: StoreClient, blocks: int = BLOCKS) -> tuple[int, int]:
    """Bytes through shared memory, there and back; the page faults that each way took."""
    hashes = chain_of(blocks)
    source, target = Memory(blocks, MIB).holds(hashes), Memory(blocks, MIB)
    span = range(blocks)
    target.data[:] = b"\1" * len(target.data)  # its own pages are there
    client.register(MANIFEST)
    before = faults()
    assert client.put(MANIFEST, 0, hashes, span, source.segments, span).stored == blocks
    written = faults()
    client.get_into(MANIFEST, 0, hashes, span, target.segments, span)
    read = faults()
    for k in span:
        assert target[k] == content_of(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES], MIB)
    return written - before, read - written


def take_huge_page() -> mmap.mmap | None:
    """One huge page of the host's; None where no free one is left."""
    try:
        return mmap.mmap(-1, HUGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    except OSError:
        return None


@pytest.fixture
def clients() -> Iterator[Callable[[StoreProcess], StoreClient]]:
    with contextlib.ExitStack() as made:
        yield lambda node: made.enter_context(StoreClient(node.url, transport="shm"))


@pytest.fixture
def set_aside() -> Iterator[None]:
    """Huge pages for the length of a test; skips where they cannot be had."""
    before = SETTING.read_text() if SETTING.exists() else ""
    if not before or not HUGETLB.exists():
        pytest.skip("no huge pages of 2 MiB: run on a kernel with CONFIG_HUGETLBFS")
    try:
        SETTING.write_text(str(int(before) + SET_ASIDE))
    except OSError as error:
        pytest.skip(f"huge pages cannot be set aside: {error}: run as root")
    try:
        if int((HUGETLB / "free_hugepages").read_text()) < SET_ASIDE // 2:
            pytest.skip("too little memory in one piece: run on a host with more of it")
        yield
    finally:
        SETTING.write_text(before)


def test_prefaulting_makes_huge_pages_and_clients_map_them_whole(
    tmp_path: Path, clients: Callable[[StoreProcess], StoreClient]
) -> None:
    with StoreProcess(tmp_path, "64MiB", "--prefault", "true") as node:
        told = stats_of(node)
        if not told["page_bytes.transparent"]:
            pytest.skip(f"no huge pages: run with shmem_enabled=advise: {node.log}")
        assert pages_of(node.pid, "Rss") == 64 * MIB
        assert pages_of(node.pid, "ShmemPmdMapped") == 64 * MIB
        assert node.says("transparent huge pages of 2.0MiB")
        written, read = put_and_get_back(clients(node))
        assert pages_of("self", "ShmemPmdMapped") >= BLOCKS * MIB
        # Anything else that the calls touch for the first time comes on top.
        assert written < BLOCKS * MIB // HUGE + 400
        assert read < 400


def test_small_pages_are_small_on_both_sides(
    tmp_path: Path, clients: Callable[[StoreProcess], StoreClient]
) -> None:
    with StoreProcess(tmp_path, "64MiB", "--prefault", "true", "--huge-pages", "off") as node:
        assert stats_of(node)["page_bytes"] == mmap.PAGESIZE
        written, _ = put_and_get_back(clients(node))
        assert written >= BLOCKS * MIB // (64 * KIB)
        assert pages_of(node.pid, "Rss") == 64 * MIB
        assert pages_of(node.pid, "ShmemPmdMapped") == pages_of("self", "ShmemPmdMapped") == 0


def test_a_node_without_huge_pages_says_what_to_do(tmp_path: Path) -> None:
    found = plan(reader(), 16 * MIB, "auto", "auto", prefault=False)
    with StoreProcess(tmp_path, "16MiB") as node:
        assert node.says(found.lack.replace('"', '\\"'))
        assert node.says("the pool has")


@pytest.mark.usefixtures("set_aside")
def test_huge_pages_that_were_set_aside_are_the_pool(
    tmp_path: Path, clients: Callable[[StoreProcess], StoreClient]
) -> None:
    with StoreProcess(tmp_path, "33MiB", "--huge-pages", "on") as node:
        told = stats_of(node)
        assert told["page_bytes.explicit"] == HUGE
        assert told["pool_bytes"] == 34 * MIB  # whole pages
        assert node.says("huge pages of 2.0MiB that this host had set aside")
        assert pages_of(node.pid, "KernelPageSize") == HUGE
        assert pages_of(node.pid, "Rss") == pages_of(node.pid, "Shared_Hugetlb") == 0
        written, read = put_and_get_back(clients(node))
        in_use = pages_of("self", "Shared_Hugetlb") + pages_of("self", "Private_Hugetlb")
        assert in_use == 2 * BLOCKS * MIB  # mapped once to write, once to read
        assert written < BLOCKS * MIB // HUGE + 400
        assert read < 400


@pytest.mark.usefixtures("set_aside")
def test_a_client_finds_its_pages_when_the_host_has_none_left(
    tmp_path: Path, clients: Callable[[StoreProcess], StoreClient]
) -> None:
    with (
        StoreProcess(tmp_path, "16MiB", "--huge-pages", "on") as node,
        contextlib.ExitStack() as taken_pages,
    ):
        while taken := take_huge_page():
            taken_pages.enter_context(contextlib.closing(taken))
        put_and_get_back(clients(node), 16)
        assert stats_of(node)["free_bytes"] == 0


@pytest.mark.usefixtures("set_aside")
def test_a_pool_that_they_are_too_few_for_gets_others(tmp_path: Path) -> None:
    free = int((HUGETLB / "free_hugepages").read_text())
    pool_bytes = (free + 1) * HUGE
    server = StoreServer(pool_bytes=pool_bytes, placement=Placement(explicit_page_bytes=HUGE))
    server.start()
    assert server.placed.pages == "small"
    assert server.placed.huge_error
    server.stop()
    only = Placement(explicit_page_bytes=HUGE, explicit_only=True)
    with pytest.raises(OSError, match="Cannot allocate"):
        StoreServer(pool_bytes=pool_bytes, placement=only).start()


@pytest.mark.usefixtures("set_aside")
def test_a_node_that_is_killed_gives_them_back(tmp_path: Path) -> None:
    def free() -> int:
        names = ("free_hugepages", "resv_hugepages")
        total, reserved = (int((HUGETLB / name).read_text()) for name in names)
        return total - reserved

    with (
        StoreProcess(tmp_path, "16MiB", "--huge-pages", "on", "--prefault", "true") as node,
        contextlib.ExitStack() as taken_pages,
    ):
        while taken := take_huge_page():  # whoever else may run here takes none meanwhile
            taken_pages.enter_context(contextlib.closing(taken))
        assert free() < 8
        node.kill()
        assert eventually(lambda: free() >= 8)


def test_a_node_that_must_have_them_does_not_start_without() -> None:
    free = (HUGETLB / "free_hugepages").read_text() if HUGETLB.exists() else "0"
    memory = str((int(free) + 4) * HUGE)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--huge-pages", "on", "--memory", memory],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "huge pages" in done.stderr
    assert "--huge-pages auto" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_client_knows_its_numa_node() -> None:
    known = Path("/sys/devices/system/node/online").exists()
    assert not known or Path(f"/sys/devices/system/node/node{current_numa_node()}").exists()
