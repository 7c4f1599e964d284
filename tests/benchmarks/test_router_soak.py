"""The soak of the router, for some seconds; and that its verdict sees what it is there to see."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.router_soak import Sample, verdict

ROOT = Path(__file__).parents[2]
STILL = Sample(0.0, rss_kib=80_000, fds=30, tasks=8, latency_ratio=3, cpu_us=60)


def test_a_flat_run_is_well() -> None:
    assert verdict([STILL] * 16, STILL, STILL) == []


def test_what_settles_in_the_first_half_is_well() -> None:
    settling = [replace(STILL, rss_kib=min(90_000, 80_000 + 4000 * k)) for k in range(16)]
    assert verdict(settling, STILL, STILL) == []


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (replace(STILL, rss_kib=88_192), "memory grew by 8.0 MiB in the last half"),
        (
            replace(STILL, store_rss_kib=8_192),
            "memory of the store grew by 8.0 MiB in the last half",
        ),
        (replace(STILL, latency_ratio=5), "latency_ratio was 3.0, then 5.0"),
        (replace(STILL, cpu_us=100), "cpu_us was 60.0, then 100.0"),
    ],
)
def test_what_is_worse_at_the_end_is_said(later: Sample, said: str) -> None:
    assert verdict([STILL] * 48 + [later] * 16, STILL, STILL) == [said]


def test_a_short_run_judges_memory_and_no_times() -> None:
    later = replace(STILL, rss_kib=88_192, latency_ratio=5, cpu_us=100)
    said = verdict([STILL] * 12 + [later] * 4, STILL, STILL)
    assert said == ["memory grew by 8.0 MiB in the last half"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (replace(STILL, fds=31), "fds: 30 before, 31 after"),
        (replace(STILL, tasks=9), "tasks: 8 before, 9 after"),
        (replace(STILL, store_fds=1), "store_fds: 0 before, 1 after"),
        (replace(STILL, held=2), "held: 0 before, 2 after"),
    ],
)
def test_what_is_left_at_the_end_is_said(after: Sample, said: str) -> None:
    assert verdict([STILL] * 16, STILL, after) == [said]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no cc (apt-get install gcc)")
@pytest.mark.benchmarks
def test_sigterm_ends_all_processes_of_a_soak() -> None:
    command = [sys.executable, "-m", "benchmarks.router_soak", "--streams", "10"]
    soak = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert soak.stdout is not None
    assert soak.stdout.readline()  # of the idle streams: all is up
    children = Path(f"/proc/{soak.pid}/task/{soak.pid}/children").read_text().split()
    assert len(children) >= 4  # engines, store, two routers
    soak.terminate()
    assert soak.wait(60) == 128 + signal.SIGTERM
    soak.stdout.close()
    assert [pid for pid in children if Path("/proc", pid).exists()] == []
