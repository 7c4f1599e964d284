"""What a node says of a host that lacks something, and how little it takes of one at its start."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess

from kvstore import host
from kvstore.host import advice, read_files

GIB = 1 << 30
POOL = 16 * GIB
GOOD = {
    host.MEMINFO: "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\n",
    host.LIMITS: "Limit  Soft Limit  Hard Limit\nMax locked memory  unlimited  unlimited  bytes\n",
    host.SHMEM_HUGE: "always within_size [advise] never deny force\n",
    host.NUMA_NODES: "0\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/sys/fs/cgroup/memory.current": "123456\n",
}


def sentences(changes: dict[str, str], pool_bytes: int = POOL) -> list[str]:
    return [one.sentence for one in advice({**GOOD, **changes}, pool_bytes)]


def test_a_host_that_has_everything_needs_no_advice() -> None:
    assert advice(GOOD, POOL) == []


def test_a_host_that_tells_nothing_is_told_of_huge_pages_alone() -> None:
    (one,) = advice({}, POOL)
    assert "no huge pages" in one.sentence
    assert one.level == logging.INFO


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({host.MEMINFO: "MemAvailable:   8388608 kB\n"}, "8.0GiB"),
        (
            {
                "/sys/fs/cgroup/memory.max": f"{12 * GIB}\n",
                "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            },
            "9.0GiB",
        ),
        (
            {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{5 * GIB}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            },
            "5.0GiB",
        ),
    ],
    ids=["memory", "cgroup v2", "cgroup v1"],
)
def test_a_pool_beyond_what_is_free_is_a_warning(changes: dict[str, str], left: str) -> None:
    (one,) = advice({**GOOD, **changes}, POOL)
    assert one.level == logging.WARNING
    assert f"a pool of 16.0GiB does not fit into the {left}" in one.sentence
    assert "--memory" in one.sentence


def test_a_limit_of_a_cgroup_that_is_none_is_none() -> None:
    unlimited = {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert sentences(unlimited) == []


@pytest.mark.parametrize(("limit", "short"), [("8388608", True), (str(POOL), False)])
def test_a_memlock_limit_below_the_pool_is_told(limit: str, short: bool) -> None:
    found = sentences({host.LIMITS: f"Max locked memory         {limit}   {limit}   bytes\n"})
    assert len(found) == int(short)
    assert all("8.0MiB" in one and "ulimit -l unlimited" in one for one in found)


@pytest.mark.parametrize("mode", ["always", "within_size", "advise", "never", "deny", "force"])
def test_huge_pages_that_are_off_are_told(mode: str) -> None:
    modes = "always within_size advise never deny force".replace(mode, f"[{mode}]")
    found = sentences({host.SHMEM_HUGE: modes})
    assert len(found) == (mode in {"never", "deny"})
    assert all(f"({mode})" in one and "echo advise >" in one for one in found)


@pytest.mark.parametrize(("online", "nodes"), [("0", 1), ("0-1", 2), ("0,2-3", 3), ("", 0)])
def test_several_numa_nodes_are_told(online: str, nodes: int) -> None:
    found = sentences({host.NUMA_NODES: online})
    assert len(found) == (nodes > 1)
    assert all(f"{nodes} NUMA nodes" in one and "numactl" in one for one in found)


def test_each_lack_is_one_sentence_of_its_own() -> None:
    found = sentences(
        {
            host.MEMINFO: "MemAvailable: 1024 kB\n",
            host.LIMITS: "Max locked memory 65536 65536 bytes\n",
            host.SHMEM_HUGE: "always within_size advise [never] deny force\n",
            host.NUMA_NODES: "0-3\n",
        }
    )
    assert len(found) == 4
    assert all("\n" not in one and ". " not in one for one in found)


def test_files_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    assert read_files(tmp_path) == {host.MEMINFO: "MemAvailable: 1 kB\n"}
    assert host.LIMITS in read_files()


def test_a_node_logs_what_its_own_host_lacks(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as node:
        pool_bytes = 64 << 20
    for one in advice(read_files(), pool_bytes):
        if "memory that are free" not in one.sentence:  # that changes from moment to moment
            assert one.sentence.replace('"', '\\"') in node.log


START = """
import sys, time
from kvstore._core import StoreServer
server = StoreServer(pool_bytes=16 << 30)
began = time.perf_counter()
server.start()
took = time.perf_counter() - began
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(took, *(int(status[name].split()[0]) for name in ("RssShmem", "RssAnon")))
server.stop()
"""


def test_a_pool_of_16_gib_is_ready_within_a_second_and_not_touched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=60
    )
    took_s, shared_kib, own_kib = map(float, done.stdout.split())
    assert took_s < 1
    assert shared_kib < 16 << 10
    assert own_kib < 64 << 10
