"""What a node says of a host that lacks something, and how little it takes of one at its start."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.store import ROOT, RUN, StoreProcess

from kvrouter_store.free_memory import CGROUPS, MEMINFO, Read, free_bytes, limit_bytes, reader
from kvrouter_store.node.placement import LOCK_LIMITS, advice

GIB = 1 << 30
POOL = 16 * GIB
V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"
GOOD = {
    CGROUPS: "4:memory:/box/inner\n0::/box/inner\n",
    MEMINFO: "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\n",
    LOCK_LIMITS: "Limit  Soft Limit  Hard Limit\nMax locked memory unlimited unlimited bytes\n",
    f"{V2}/memory.max": "max\n",
    f"{V2}/memory.current": "123456\n",
}


def read_from(files: dict[str, str]) -> Read:
    return lambda name: files.get(name, "")


def sentences(changes: dict[str, str], pool_bytes: int = POOL) -> list[str]:
    return [one.sentence for one in advice(read_from({**GOOD, **changes}), pool_bytes)]


def test_a_host_that_has_everything_needs_no_advice() -> None:
    assert advice(read_from(GOOD), POOL) == []


def test_a_host_that_tells_nothing_is_told_nothing() -> None:
    assert advice(read_from({}), POOL) == []


def test_memory_that_was_set_aside_is_none_of_what_is_free() -> None:
    short = {**GOOD, MEMINFO: "MemAvailable:   8388608 kB\n"}
    assert advice(read_from(short), POOL, set_aside=True) == []


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({MEMINFO: "MemAvailable:   8388608 kB\n"}, "8.0GiB"),
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
    (one,) = advice(read_from({**GOOD, **changes}), POOL)
    assert one.level == logging.WARNING
    assert f"a pool of 16.0GiB does not fit into the {left}" in one.sentence
    assert "--memory" in one.sentence


@pytest.mark.parametrize(("limit", "short"), [("8388608", True), (str(POOL), False)])
def test_a_memlock_limit_below_the_pool_is_told(limit: str, short: bool) -> None:
    found = sentences({LOCK_LIMITS: f"Max locked memory         {limit}   {limit}   bytes\n"})
    assert len(found) == int(short)
    assert all("8.0MiB" in one and "ulimit -l unlimited" in one for one in found)


def test_each_lack_is_one_sentence_of_its_own() -> None:
    found = sentences(
        {
            MEMINFO: "MemAvailable: 1024 kB\n",
            LOCK_LIMITS: "Max locked memory 65536 65536 bytes\n",
        }
    )
    assert len(found) == 2
    assert all("\n" not in one and ". " not in one for one in found)


@pytest.mark.parametrize("place", [f"{V2}/box/inner", f"{V2}/box", V2], ids=["own", "its", "root"])
def test_the_least_limit_of_all_cgroups_above_is_the_limit(place: str) -> None:
    files = {**GOOD, f"{V2}/box/inner/memory.max": f"{9 * GIB}\n", f"{place}/memory.max": "4096\n"}
    assert limit_bytes(read_from(files)) == 4096
    assert free_bytes(read_from({**files, f"{place}/memory.current": "96\n"})) == 4000


def test_a_version_1_hierarchy_is_read_beside_an_empty_version_2() -> None:
    files = {**GOOD, f"{V1}/box/memory.limit_in_bytes": f"{5 * GIB}\n"}
    assert limit_bytes(read_from(files)) == 5 * GIB


def test_cached_files_count_as_free_for_the_kernel_drops_them() -> None:
    files = {
        **GOOD,
        f"{V2}/memory.max": f"{8 * GIB}\n",
        f"{V2}/memory.current": f"{8 * GIB}\n",
        f"{V2}/memory.stat": f"anon 5\ninactive_file {6 * GIB}\n",
    }
    assert free_bytes(read_from(files)) == 6 * GIB


def test_a_limit_above_all_memory_is_none() -> None:
    files = {**GOOD, f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}
    assert limit_bytes(read_from(files)) is None


def test_files_that_are_not_there_are_empty(tmp_path: Path) -> None:
    assert reader(tmp_path)(MEMINFO) == ""
    assert free_bytes(reader(tmp_path)) is None
    assert reader()(MEMINFO)


def test_a_node_logs_what_its_own_host_lacks(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as node:
        pool_bytes = 64 << 20
    for one in advice(reader(), pool_bytes):
        if "memory that are free" not in one.sentence:  # that changes from moment to moment
            assert node.says(one.sentence.replace('"', '\\"'))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup within one that is limited to 64 MiB."""
    root = Path(V2)
    second = (root / "cgroup.controllers").exists()
    limited = (root if second else root / "memory") / f"kvrouter-test-{os.getpid()}"
    inner = limited / "inner"
    try:
        inner.mkdir(parents=True)
        name = "memory.max" if second else "memory.limit_in_bytes"
        (limited / name).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}: run as root")
    try:
        yield inner
    finally:
        inner.rmdir()
        limited.rmdir()


def test_a_pool_beyond_the_limit_of_its_container_does_not_start(
    cgroup: Path, tmp_path: Path
) -> None:
    inside = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh")
    flags = ("--port", "0", "--http-port", "0", "--unix-socket", str(tmp_path / "s.sock"))
    done = subprocess.run(
        [*inside, sys.executable, "-c", RUN, "--memory", "128MiB", *flags],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "a pool of 128.0MiB does not fit into the 64.0MiB of memory to which this" in done.stderr
    assert "--memory" in done.stderr


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
