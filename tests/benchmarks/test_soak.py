"""The soak, for some seconds; and that its verdict sees what it is there to see."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.soak import Figures, verdict

ROOT = Path(__file__).resolve().parent.parent.parent
IDLE = {"reserved_blocks": 0, "fenced_blocks": 0, "leases": 0, "waits": 0, "blocks": 9}
STILL = Figures(0.0, rss_kib=40_000, fds=14, threads=2, gauges=IDLE)


def test_a_flat_run_is_well() -> None:
    assert verdict([STILL] * 8, STILL, STILL, growth_mib=1) == []


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (replace(STILL, wrong=1), "wrong bytes"),
        (replace(STILL, fds=15), "fds: 14 before, 15 after"),
        (replace(STILL, threads=3), "threads: 2 before, 3 after"),
        (replace(STILL, gauges=IDLE | {"leases": 1}), "leases is 1"),
    ],
)
def test_what_is_left_at_the_end_is_said(last: Figures, said: str) -> None:
    (found,) = verdict([STILL] * 8, STILL, last, growth_mib=1)
    assert said in found


def test_memory_that_grows_on_in_the_last_half_is_said() -> None:
    growing = [replace(STILL, rss_kib=40_000 + 1024 * k) for k in range(8)]
    (found,) = verdict(growing, STILL, STILL, growth_mib=1)
    assert found == "memory grew by 2.0 MiB in the last half"
    settled = [replace(STILL, rss_kib=min(44_000, 40_000 + 1024 * k)) for k in range(8)]
    assert verdict(settled, STILL, STILL, growth_mib=1) == []


@pytest.mark.timeout(300)
@pytest.mark.benchmarks
def test_clients_die_at_random_and_nothing_is_left_of_them(tmp_path: Path) -> None:
    flags = "--seconds 20 --every 2 --kill-every 1 --memory 16MiB --growth-mib 16 --clients 5"
    log = tmp_path / "soak.log"
    command = [sys.executable, "-m", "benchmarks.soak", *flags.split(), "--log", str(log)]
    run = subprocess.run(
        [*command, "--", "--eviction", "lru"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    reports = [json.loads(line) for line in log.read_text().splitlines()]
    assert run.returncode == 0, (reports[-1], run.stderr)
    assert reports[-1] == {"verdict": "well"}
    last = reports[-2]
    assert last["wrong"] == 0
    assert last["killed"] >= 5
    assert last["gauges"]["evictions_total.capacity"] > 0
    assert {"put", "get", "acquire", "wait", "match"} <= last["done"].keys()


def test_sigterm_ends_all_processes_of_a_soak() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--every", "0.1", "--kill-every", "0.1"]
    soak = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert soak.stdout is not None
    assert all(soak.stdout.readline() for _ in range(3))  # clients were started after the first
    children = Path(f"/proc/{soak.pid}/task/{soak.pid}/children").read_text().split()
    assert len(children) >= 2
    soak.terminate()
    assert soak.wait(30) == 128 + signal.SIGTERM
    soak.stdout.close()
    assert [pid for pid in children if Path("/proc", pid).exists()] == []
