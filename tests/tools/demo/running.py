"""`kvrouter demo` as a process, and every process that it was seen to have."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kvrouter", "demo"]
QUICK = ["--documents", "2", "--conversations", "6", "--turns", "2", "--answer-tokens", "8"]
DEADLINE_S = 90


def children(pid: int) -> set[int]:
    """The processes that a process started and has not waited for."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {int(child) for child in listed.split()}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
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
            [*COMMAND, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Read the rest of its output; its exit status."""
        out, _ = self.process.communicate(timeout=deadline_s)
        self.said += out
        return self.process.returncode

    def close(self) -> None:
        """End it where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
