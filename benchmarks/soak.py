"""One store node under mixed load for a long time, while its clients are killed at random.

    python -m benchmarks.soak --seconds 3600 --log FILE [-- NODE FLAGS]

Each report is one line of JSON. At the end the clients stop, and the node must hold nothing for
them. Exit code 1 if a byte was wrong, a gauge did not return to zero, the node's own memory
(without its pool) grew by more than `--growth-mib` from the third quarter of the time to the last,
descriptors or threads are left, or the node did not end by itself.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TextIO, TypeVar

from tests.chaos.gauges import HELD
from tests.fakes.store import StoreProcess

from benchmarks.arguments import parser_of
from benchmarks.wire_rig import leave_in_order

KINDS = ("shm", "shm", "unix", "tcp", "shm", "tcp")
KEPT = (*HELD, "lent_bytes")  # for clients: zero without any
Sample = TypeVar("Sample")
PATIENCE_S = 30.0
DRAIN_PAUSE_S = 0.2
LEAST_SAMPLES = 4


@dataclass
class Figures:
    """The node at one moment, and its clients' operations until then."""

    at_s: float
    rss_kib: int  # its own pages: not the pool, nor files
    fds: int
    threads: int
    gauges: dict[str, int]
    done: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    killed: int = 0


def verdict(
    samples: Sequence[Figures], first: Figures, last: Figures, growth_mib: float
) -> list[str]:
    """The problems, as sentences.

    `first`: before any client; `last`: after the last one.
    """
    found = []
    if last.wrong:
        found.append(f"{last.wrong} blocks had wrong bytes")
    found += [f"{name} is {n}, not 0" for name, n in last.gauges.items() if name in KEPT and n]
    if len(samples) >= LEAST_SAMPLES:
        found += growth(samples, "rss_kib", "memory", growth_mib)
    return found + left_over(first, last, ("fds", "threads"))


def last_quarters(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Those of the third quarter of the time, and those of the last."""
    quarter = len(samples) // 4
    return samples[-2 * quarter : -quarter], samples[-quarter:]


def growth(samples: Sequence[object], name: str, what: str, most_mib: float) -> list[str]:
    """A sentence if the median of some KiB grew by more from the third quarter to the last."""
    was, now = (median(getattr(s, name) for s in each) for each in last_quarters(samples))
    grown = (now - was) / 1024
    return [f"{what} grew by {grown:.1f} MiB in the last half"] if grown > most_mib else []


def left_over(before: object, after: object, names: Sequence[str]) -> list[str]:
    """A sentence for each figure that is larger after a run than before."""
    found = ((name, getattr(before, name), getattr(after, name)) for name in names)
    return [f"{name}: {was} before, {now} after" for name, was, now in found if now > was]


class Node(StoreProcess):
    """A store node as its command starts it."""

    def __init__(self, folder: Path, memory: str, flags: Sequence[str]) -> None:
        super().__init__(folder, memory, *flags)
        self.program = ["-m", "kvrouter", "store"]

    def figures(self, at_s: float) -> Figures:
        """Its use of the machine now, and what it holds."""
        rss_kib, fds = own_memory_and_files(self.pid)
        with urllib.request.urlopen(f"{self.http_url}/stats", timeout=PATIENCE_S) as answer:
            stats = json.load(answer)
        names = (*KEPT, "blocks", "connections", "evictions_total.capacity", "corrupt_total")
        gauges = {name: stats[name] for name in names}
        return Figures(at_s, rss_kib, fds, threads_of(self.pid), gauges)


def own_memory_and_files(pid: int) -> tuple[int, int]:
    """KiB of a process's own pages, and its descriptors."""
    own = Path("/proc") / str(pid)
    return kib_of(own / "status", "RssAnon"), len(list((own / "fd").iterdir()))


def threads_of(pid: int) -> int:
    """Its own threads, without those of the kernel for io_uring, whose number varies."""
    names = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/comm")]
    return sum(not name.startswith("iou-") for name in names)


def kib_of(file: Path, name: str) -> int:
    """A line `name: N kB` of a file in /proc."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")


class Clients:
    """Client processes, each with a file of what it did."""

    def __init__(self, url: str, folder: Path, dice: random.Random) -> None:
        self._url, self._folder, self._dice = url, folder, dice
        self._started = 0
        self._files: list[Path] = []
        self._living: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.killed = 0

    def start(self, kind: str) -> None:
        """Start one more client, over this transport."""
        self._started += 1
        file = self._folder / f"client-{self._started}.json"
        name = [self._url, kind, str(self._started), str(file)]
        command = [sys.executable, "-m", "benchmarks.soak_client", *name]
        self._files.append(file)
        self._living.append((kind, subprocess.Popen(command)))

    def kill_one(self) -> None:
        """Kill one of them with SIGKILL, and replace it."""
        kind, process = self._living.pop(self._dice.randrange(len(self._living)))
        if (code := process.poll()) is not None:
            raise SystemExit(f"a client ended by itself with {code}")
        process.kill()
        process.wait()
        self.killed += 1
        self.start(kind)

    def stop(self) -> None:
        """End half of them with SIGTERM, and kill the others."""
        for k, (_, process) in enumerate(self._living):
            process.send_signal((signal.SIGTERM, signal.SIGKILL)[k % 2])
        for _, process in self._living:
            process.wait(PATIENCE_S)
        self._living.clear()

    def done(self) -> tuple[Counter[str], int]:
        """Operations and errors by kind, and wrong blocks, of all clients so far."""
        done: Counter[str] = Counter()
        wrong = 0
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                tally = json.loads(file.read_text())
                done.update(tally["done"])
                wrong += tally["wrong"]
        return done, wrong


class Soak:
    """The run: load, deaths, reports, and the verdict."""

    def __init__(self, options: argparse.Namespace, node: Node, clients: Clients) -> None:
        self._options, self._node, self._clients = options, node, clients
        self._dice = random.Random(1)
        self._begun = time.monotonic()
        self.samples: list[Figures] = []

    def run(self, log: TextIO | None) -> list[str]:
        """The problems at the end."""
        first = self._report(log)
        for k in range(self._options.clients):
            self._clients.start(KINDS[k % len(KINDS)])
        for _ in self._deaths():
            if self._passed_s() >= self._options.every * (1 + len(self.samples)):
                self.samples.append(self._report(log))
        self._clients.stop()
        last = self._drained(first, log)
        return verdict(self.samples, first, last, self._options.growth_mib)

    def _passed_s(self) -> float:
        return time.monotonic() - self._begun

    def _deaths(self) -> Iterator[None]:
        """Kill a client after each pause, until the time is over."""
        while (left_s := self._options.seconds - self._passed_s()) > 0:
            pause_s = self._dice.uniform(0.5, 1.5) * self._options.kill_every
            time.sleep(min(left_s, pause_s))
            self._clients.kill_one()
            yield

    def _report(self, log: TextIO | None) -> Figures:
        return self._told(self._node.figures(round(self._passed_s(), 1)), log)

    def _told(self, figures: Figures, log: TextIO | None) -> Figures:
        done, figures.wrong = self._clients.done()
        figures.done = dict(done)
        figures.killed = self._clients.killed
        report(json.dumps(asdict(figures)), log)
        return figures

    def _drained(self, first: Figures, log: TextIO | None) -> Figures:
        """The figures when nothing of the clients is left, or after a time-out."""
        end = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(DRAIN_PAUSE_S)  # for the connection that asked last to be gone
            figures = self._node.figures(round(self._passed_s(), 1))
            held = any(figures.gauges[name] for name in (*KEPT, "connections"))
            left = figures.fds > first.fds or figures.threads > first.threads
            if not (held or left) or time.monotonic() > end:
                return self._told(figures, log)


def report(line: str, log: TextIO | None) -> None:
    """Print it, and write it to the log."""
    print(line, flush=True)
    if log is not None:
        print(line, file=log, flush=True)


def options_of(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's own flags, and those for the node."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = parser_of("benchmarks.soak", __doc__, "Flags after -- go to the node.", figures=False)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--log", type=Path, help="the reports, one JSON object per line")
    parser.add_argument("--memory", default="48MiB", help="the node's pool: a third of the load")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=30, help="seconds between reports")
    parser.add_argument("--kill-every", type=float, default=3, help="seconds between deaths, mean")
    parser.add_argument("--growth-mib", type=float, default=2, help="that memory may grow")
    return parser.parse_args(arguments[:place]), arguments[place + 1 :]


def main() -> int:
    """Run it; 1 if there was a problem."""
    options, flags = options_of(sys.argv[1:])
    leave_in_order()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        log = stack.enter_context(options.log.open("w")) if options.log else None
        node = stack.enter_context(Node(folder, options.memory, flags))
        clients, pid = Clients(node.url, folder, random.Random(1)), node.pid
        try:
            found = Soak(options, node, clients).run(log)
            if code := node.stop():
                found.append(f"the node ended with {code}")
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            clients.stop()
        report(json.dumps({"verdict": found or "well"}), log)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
