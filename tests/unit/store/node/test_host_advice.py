"""What a node says of a host that lacks something, and how little it takes of one at its start."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.store import StoreProcess

from kvrouter_store.node import host_advice as host
from kvrouter_store.node.host_advice import advice, read_files

GIB = 1 << 30
POOL = 16 * GIB
GOOD = {
    host.MEMINFO: "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\n",
    host.LIMITS: "Limit  Soft Limit  Hard Limit\nMax locked memory  unlimited  unlimited  bytes\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/sys/fs/cgroup/memory.current": "123456\n",
}


def sentences(changes: dict[str, str], pool_bytes: int = POOL) -> list[str]:
    return [one.sentence for one in advice({**GOOD, **changes}, pool_bytes)]


def test_a_host_that_has_everything_needs_no_advice() -> None:
    assert advice(GOOD, POOL) == []


def test_a_host_that_tells_nothing_is_told_nothing() -> None:
    assert advice({}, POOL) == []


def test_memory_that_was_set_aside_is_none_of_what_is_free() -> None:
    short = {**GOOD, host.MEMINFO: "MemAvailable:   8388608 kB\n"}
    assert advice(short, POOL, set_aside=True) == []


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


def test_each_lack_is_one_sentence_of_its_own() -> None:
    found = sentences(
        {
            host.MEMINFO: "MemAvailable: 1024 kB\n",
            host.LIMITS: "Max locked memory 65536 65536 bytes\n",
        }
    )
    assert len(found) == 2
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
            assert node.says(one.sentence.replace('"', '\\"'))


START = """
import glob, os, sys, time
from kvrouter_store._core import StoreServer
server = StoreServer(pool_bytes=16 << 30)
began = time.perf_counter()
server.start()
took = time.perf_counter() - began
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(took, *(int(status[name].split()[0]) for name in ("RssShmem", "RssAnon")), end=" ")
links = [fd for fd in glob.glob("/proc/self/fd/*") if os.path.lexists(fd)]
pool = os.stat(next(fd for fd in links if "kvstore-pool" in os.readlink(fd)))
print(pool.st_size, pool.st_blocks * 512)
server.stop()
"""


def test_a_pool_of_16_gib_is_ready_within_a_second_and_not_touched() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=60
    )
    took_s, shared_kib, own_kib, pool_bytes, touched_bytes = map(float, done.stdout.split())
    assert took_s < 1
    assert pool_bytes == 16 << 30
    assert touched_bytes == 0
    assert shared_kib < 16 << 10
    assert own_kib < 64 << 10
