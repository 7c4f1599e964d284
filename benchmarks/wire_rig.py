"""Processes of the wire benchmark on their cores, and the CPU seconds that they use.

The router under test has one core, all other processes the other.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).resolve().parent / "native"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0


def leave_in_order() -> None:
    """Let SIGTERM end this process like an exception, so that its processes end too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@dataclass(frozen=True)
class Cores:
    """The core of the router, and the core of load, engines and store."""

    router: int
    rest: int

    @classmethod
    def pick(cls) -> "Cores":
        """The last core for the router. With a single core, figures mean little."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(router=usable[-1], rest=usable[0])


@contextmanager
def on_core(*cores: int) -> Iterator[None]:
    """Processes started inside inherit the core, or all cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def compile_native(name: str, folder: Path, *flags: str) -> Path:
    """Compile benchmarks/native/NAME.c; what came of it. Raises RuntimeError."""
    program = folder / name
    compiler = os.environ.get("CC", "cc")
    source = str(NATIVE / f"{name}.c")
    try:
        subprocess.run([compiler, "-O2", "-o", str(program), source, *flags], check=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"no C compiler ({compiler}): install one or set CC") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{name}.c cannot be compiled") from error
    return program


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with suppress(OSError):  # it ended meanwhile
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from family(int(child))


def cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and its descendants, of all their threads.

    The clock id of a process is ~pid << 3 | 2: clock_getcpuclockid(3) on Linux.
    """
    total = 0.0
    for each in family(pid):
        with suppress(OSError):  # it ended meanwhile
            total += time.clock_gettime((~each << 3) | 2)
    return total


def share_of_core(pids: Sequence[int], seconds: float) -> float:
    """The share of one core that processes use together from now on."""
    before_s = sum(map(cpu_s, pids))
    time.sleep(seconds)
    return (sum(map(cpu_s, pids)) - before_s) / seconds


def loop_ms(core: int) -> float:
    """CPU milliseconds of a fixed loop on `core`: the speed of the machine now."""
    with on_core(core):
        begun_s = time.thread_time()
        _fixed_loop()
        return (time.thread_time() - begun_s) * 1e3


def _fixed_loop() -> dict[str, int]:
    return {str(number): number for number in range(100_000)}


class Process:
    """A process on some cores, its output in a file; a context manager that ends it.

    Its standard input is empty, and ends with it or with this process.
    """

    def __init__(
        self, name: str, command: list[str], cores: Iterable[int], folder: Path, **more: str
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        # No load balancer is in front of it.
        environment = {**os.environ, "KVROUTER_DRAIN_DELAY_S": "0", **more}
        with on_core(*cores), self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.terminate()
        try:
            self.popen.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait()

    def output(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def await_output(self, mark: str) -> str:
        """Wait until its output has the mark; returns the output."""
        self.await_true(lambda: mark in self.output())
        return self.output()

    def await_answer(self, url: str) -> None:
        """Wait until it answers 200 at that URL."""
        self.await_true(lambda: answers(url))

    def await_true(self, seen: Callable[[], bool]) -> None:
        """Wait until `seen`. Raises RuntimeError if the process or the time ends before."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline and self.popen.poll() is None:
            if seen():
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} did not start: {self.output()[-2000:].strip()}")


def answers(url: str) -> bool:
    """Whether a GET is answered 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, body: str) -> dict[str, Any]:
    """POST a JSON body; the JSON answer. Raises OSError for an error status."""
    request = urllib.request.Request(
        url, data=body.encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        document: dict[str, Any] = json.load(answer)
        return document
