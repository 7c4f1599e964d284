"""A router and a store under load for a long time: memory and latency must not grow.

    python -m benchmarks.router_soak --seconds 600 [--log FILE] [--streams 2000]

Sends bursts of requests as fast as the router accepts them, and of paced streams, with pauses, so
that it is busy a share of the time. Policy, KV events, store and landings, metrics and log are on.
Before that, 2,000 streams send one event and
then stay idle. The last line of JSON is the verdict: exit code 1 if memory, CPU per request or
latency (relative to that without a router, so that other work of the machine does not count) grew
in the second half, or if descriptors, tasks, requests, leases or waits are left. A run of less than
five minutes does not judge times, which depend on other work of the machine.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.gauges import HELD, ROUTER_GAUGES, total
from tests.fakes.patience import eventually

from benchmarks.arguments import parser_of
from benchmarks.soak import growth, last_quarters, left_over, own_memory_and_files, report
from benchmarks.wire_prompts import SIZES, prompts, write_bodies
from benchmarks.wire_rig import leave_in_order
from benchmarks.wire_stage import Router, Stage, set_stage

CONNECTIONS = 32
BURST_S, DIRECT_S, STREAM_EVENTS, STREAMS_PACE = 1.5, 0.3, 20, 20
SETTLE_S = 12.0
BUSY = 0.7  # share of the time that the router is under load
IDLE_GAP_US = 100_000_000
# Both are full soon, so that memory can be flat: blocks in the router's index, bytes in the store.
INDEX_BLOCKS, STORE_MEMORY = 65_536, "128MiB"
LEAST_SAMPLES, LEAST_TIMES = 16, 64  # fewer say nothing of growth of memory, of times
LEFT_OVER = ("fds", "tasks", "store_fds", "held")
UNSEEN = "not looked at: the run was too short"
GROWTH_MIB = 4.0
TIMES, SLOWER = ("latency_ratio", "cpu_us"), 1.5


@dataclass
class Sample:
    """Router and store at one moment, and the cost of the bursts before it."""

    at_s: float
    rss_kib: int
    fds: int
    tasks: int
    store_rss_kib: int = 0
    store_fds: int = 0
    held: float = 0  # sum of the gauges of requests in flight, of router and store
    latency_p50_us: float = 0.0
    latency_ratio: float = 0.0  # to asking an engine without a router, in the same moment
    cpu_us: float = 0.0
    requests: int = 0
    events: int = 0


def verdict(samples: Sequence[Sample], before: Sample, after: Sample) -> list[str]:
    """The problems, as sentences: compares the third quarter of the time with the last one."""
    found = []
    if len(samples) >= LEAST_SAMPLES:
        found += growth(samples, "rss_kib", "memory", GROWTH_MIB)
        found += growth(samples, "store_rss_kib", "memory of the store", GROWTH_MIB)
    for name in TIMES if len(samples) >= LEAST_TIMES else ():
        was, now = (_best_tenth(each, name) for each in last_quarters(samples))
        if now > SLOWER * was:
            found.append(f"{name} was {was:.1f}, then {now:.1f}")
    return found + left_over(before, after, LEFT_OVER)


def _best_tenth(samples: Sequence[Sample], name: str) -> float:
    """The value of the best tenth of the samples, when the machine does no other work."""
    values = sorted(getattr(sample, name) for sample in samples)
    return float(values[len(values) // 10])


class Soak:
    """One run with the router of a stage.

    Args:
        stage: router, store and engines.
        folder: for bodies of requests.
        log: file for the reports, or None.
    """

    def __init__(self, stage: Stage, folder: Path, log: Path | None) -> None:
        self._stage = stage
        self._router: Router = stage.prefix
        streams = prompts("ids", SIZES["short"], max_tokens=STREAM_EVENTS, stream=True)
        self._streams = write_bodies(folder, "streams", streams)
        self._requests = write_bodies(folder, "requests", prompts("ids", SIZES["8 KiB"]))
        self._log = log.open("w") if log else None
        self._begun_s = time.monotonic()
        self.samples: list[Sample] = []

    def run(self, seconds: float, streams: int) -> list[str]:
        """The problems at the end."""
        self._burst()  # what the first requests make is there in both figures
        before = self._settled(None)
        self._idle_streams(streams, before)
        self._begun_s = time.monotonic()
        while time.monotonic() - self._begun_s < seconds:
            begun_s = time.monotonic()
            sample = self._burst()
            self.samples.append(sample)
            self._tell(sample)
            busy_s = time.monotonic() - begun_s
            time.sleep(busy_s * (1 - BUSY) / BUSY)
        after = self._settled(before)
        self._tell(after)
        return verdict(self.samples, before, after)

    def _burst(self) -> Sample:
        """Send requests as fast as possible, then streams; their cost."""
        stage, router = self._stage, self._router
        whole = stage.load(router, self._requests, CONNECTIONS, BURST_S)
        engine = Router(router.process, int(stage.engines[-1].rpartition(":")[2]))
        direct = stage.load(engine, self._requests, CONNECTIONS, DIRECT_S)
        streams = stage.load(router, self._streams, 2 * CONNECTIONS, 20, STREAMS_PACE)
        sample = self._look()
        sample.latency_p50_us = round(whole.latency_p50_us, 1)
        sample.latency_ratio = round(whole.latency_p50_us / direct.latency_p50_us, 2)
        sample.requests, sample.events = whole.answered, streams.events
        sample.cpu_us = round(whole.router_s / sample.requests * 1e6, 1)
        return sample

    def _idle_streams(self, count: int, before: Sample) -> None:
        """Hold that many idle streams, and print the cost of one."""
        self._stage.set_gap(IDLE_GAP_US)
        command = [str(self._stage.load_program), "-p", str(self._router.port), "-c", str(count)]
        command += ["-t", "100", "-1", str(self._streams)]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: self._look().tasks >= before.tasks + count, 60, 0.2)
            time.sleep(1)
            now = self._look()
        finally:
            load.kill()
            load.wait()
        held = now.tasks - before.tasks
        per_kib = (now.rss_kib - before.rss_kib) / max(held, 1)
        found = {"idle_streams": held, "kib_per_stream": round(per_kib, 1), "fds": now.fds}
        report(json.dumps(found), self._log)
        self._settled(before)

    def _look(self) -> Sample:
        page_url = f"http://127.0.0.1:{self._router.port}/metrics"
        with urllib.request.urlopen(page_url, timeout=30) as answer:
            page = answer.read().decode()
        with urllib.request.urlopen(f"{self._stage.store.http_url}/stats", timeout=30) as answer:
            stats = json.load(answer)
        held = sum(total(page, name) for name in ROUTER_GAUGES)
        return Sample(
            round(time.monotonic() - self._begun_s, 1),
            *own_memory_and_files(self._router.process.pid),
            int(total(page, "kvrouter:tasks")),
            *own_memory_and_files(self._stage.store.pid),
            held + sum(stats[name] for name in HELD),
        )

    def _settled(self, before: Sample | None) -> Sample:
        """The router when its connections have ended, or as before, whichever is earlier."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            now = self._look()
            back = before is not None and all(
                getattr(now, name) <= getattr(before, name) for name in LEFT_OVER
            )
            if back or time.monotonic() > end_s:
                return now
            time.sleep(0.5)

    def _tell(self, sample: Sample) -> None:
        report(json.dumps(asdict(sample)), self._log)


def main() -> int:
    """Run it; 1 if there was a problem."""
    parser = parser_of("benchmarks.router_soak", __doc__, figures=False)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=2000, help="idle streams to hold first")
    parser.add_argument("--log", type=Path, help="the reports, one JSON object per line")
    options = parser.parse_args()
    leave_in_order()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-soak-")))
        more = ["--index-blocks", str(INDEX_BLOCKS)]
        stage = stack.enter_context(
            set_stage(folder, with_peers=False, options=more, store_memory=STORE_MEMORY)
        )
        soak = Soak(stage, folder, options.log)
        found = soak.run(options.seconds, options.streams)
        requests = sum(sample.requests for sample in soak.samples)
        events = sum(sample.events for sample in soak.samples)
        count = len(soak.samples)
        memory, times = (
            "looked at" if count >= least else UNSEEN for least in (LEAST_SAMPLES, LEAST_TIMES)
        )
        sums = {"requests": requests, "events": events, "samples": count}
        report(json.dumps({**sums, "memory": memory, "times": times}), None)
        report(json.dumps({"verdict": found or "well"}), None)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
