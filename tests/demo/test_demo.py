"""`kvrouter demo` as a user runs it: to its end, stopped half-way, and killed."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kvrouter.cli", "demo"]
QUICK = ["--documents", "2", "--conversations", "6", "--turns", "2", "--answer-tokens", "8"]
DEADLINE_S = 90


def children(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in listed.read_text().split()} if listed.exists() else set()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody has waited for does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def all_gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 15
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        os.sched_yield()
    return not any(alive(pid) for pid in pids)


class Running:
    """A demo that runs, and every process that it was seen to have."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.children: set[int] = set()
        self.said = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read its output up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            self.children |= children(self.process.pid)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"the demo ended before {pattern!r}:\n{self.said}")

    def end(self) -> int:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        self.said += out
        return self.process.returncode


@pytest.fixture
def running() -> Iterator[type[Running]]:
    started: list[Running] = []

    class Tracked(Running):
        def __init__(self, *flags: str) -> None:
            super().__init__(*flags)
            started.append(self)

    yield Tracked
    for demo in started:
        if demo.process.poll() is None:
            demo.process.kill()
        demo.process.wait()
        if demo.process.stdout is not None:
            demo.process.stdout.close()


def test_it_ends_well_with_figures_and_leaves_nothing_behind(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("killing prefill-0")
    assert demo.end() == 0, demo.said
    assert len(demo.children) == 6
    assert all_gone(demo.children)
    assert "14 of 14 answers complete and right" in demo.said
    assert re.search(r"cold .* TTFT median +[\d.]+ ms", demo.said)
    assert re.search(r"warm .* TTFT median +[\d.]+ ms", demo.said)
    assert re.search(r"hit rate \d+\.\d%", demo.said)
    assert "\x1b" not in demo.said


def test_kept_it_answers_until_it_is_told_to_stop(running: type[Running]) -> None:
    demo = running(*QUICK, "--keep")
    url = demo.until(r"curl (http://\S+)")[1]
    body = b'{"model": "demo-8b", "prompt": "Once upon a time", "max_tokens": 4}'
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 0
    assert all_gone(demo.children)


def test_stopped_half_way_it_takes_everything_with_it(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("cold")
    demo.process.send_signal(signal.SIGTERM)
    assert demo.end() == 130
    assert demo.children
    assert all_gone(demo.children)


def test_killed_it_takes_everything_with_it(running: type[Running]) -> None:
    demo = running(*QUICK)
    demo.until("cold")
    demo.process.kill()
    demo.process.wait()
    assert len(demo.children) == 6
    assert all_gone(demo.children)


def test_no_torch_is_imported_on_the_way() -> None:
    code = (
        "import sys, kvrouter.demo.run, kvrouter.sim.serve, kvstore.serve;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'vllm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
