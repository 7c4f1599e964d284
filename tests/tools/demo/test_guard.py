"""The guard of a command with processes of its own: nothing outlives it, nothing is left lying."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.store import eventually
from tests.tools.demo.running import alive, all_gone, descendants

GUARD = [sys.executable, "-m", "kvrouter.tools.demo.guard"]
PARENT = """
import signal, subprocess, sys, time
{how}
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep({time_s})
"""
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SHARES = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""
Guarded = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*GUARD, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_status_is_that_of_the_command(guarded: Guarded) -> None:
    assert guarded("sh", "-c", "exit 7").wait(30) == 7


@pytest.mark.parametrize("how", ["", IGNORES])
def test_sigterm_ends_all_processes(guarded: Guarded, how: str) -> None:
    process = guarded(sys.executable, "-c", PARENT.format(how=how, time_s=600))
    child = int(first_line(process))
    everyone = descendants(process.pid)
    assert child in everyone
    process.terminate()
    process.wait(30)
    assert all_gone(everyone)


def test_what_the_command_leaves_behind_ends_with_it(guarded: Guarded) -> None:
    process = guarded(sys.executable, "-c", PARENT.format(how="", time_s=0))
    child = int(first_line(process))
    assert process.wait(30) == 0
    assert not alive(child)


def tracked(pid: int) -> bool:
    """Whether the resource tracker runs: before that, it looks like the process that forked it."""
    lines = (Path(f"/proc/{one}/cmdline").read_bytes() for one in descendants(pid))
    return any(b"resource_tracker" in line for line in lines)


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGTERM])
def test_shared_memory_of_the_killed_is_cleaned_up(guarded: Guarded, how: signal.Signals) -> None:
    process = guarded(sys.executable, "-c", SHARES)
    memory = Path("/dev/shm", first_line(process))
    assert eventually(lambda: tracked(process.pid))
    everyone = descendants(process.pid)
    assert memory.exists()
    process.send_signal(how)
    process.wait(30)
    assert all_gone(everyone)
    assert not memory.exists()
