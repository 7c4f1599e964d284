"""One router under load for long, and what an idle stream costs it: flat memory, flat latency.

    python -m benchmarks.router_soak --seconds 600 [--log FILE] [--streams 2000]

Bursts of requests as fast as the router takes them, and of paced streams, with pauses, so that it
is busy 70 % of the time: with policy, KV events, store and landings, metrics and log. First 2,000
streams are held that say one thing and then nothing. The last line of JSON is the verdict: exit
code 1 where memory, CPU per request or latency (as a multiple of that without a router, so that
other work on the machine does not count) grew in the second half, or descriptors or tasks were
left over.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.soak import kib_of, tell
from benchmarks.wire_prompts import SIZES, prompts
from benchmarks.wire_stage import Router, Stage, set_stage

__all__ = ["Sample", "verdict"]

BUSY_SHARE = 0.7
CONNECTIONS = 32
BURST_S, DIRECT_S, STREAM_EVENTS, STREAMS_PACE = 1.5, 0.3, 20, 20
SETTLE_S = 12.0
IDLE_GAP_US = 100_000_000
INDEX_BLOCKS = 65_536  # few, so that the index is full soon and memory can be flat
LEAST_SAMPLES = 16  # fewer say nothing of growth
UNSEEN = "not looked at: the run was too short"
GROWTH_MIB = 4.0
SLOWER = 1.5


@dataclass
class Sample:
    """The router at one moment, and what the bursts before it cost."""

    at_s: float
    rss_kib: int
    fds: int
    tasks: int
    latency_p50_us: float = 0.0
    latency_ratio: float = 0.0  # to asking an engine without a router, in the same moment
    cpu_us: float = 0.0
    requests: int = 0
    events: int = 0


def verdict(samples: Sequence[Sample], before: Sample, after: Sample) -> list[str]:
    """What is wrong, as sentences: the third quarter of the time is compared with the last one."""
    found = []
    quarter = len(samples) // 4
    if len(samples) >= LEAST_SAMPLES:
        third, last = samples[-2 * quarter : -quarter], samples[-quarter:]
        grown = (_median(last, "rss_kib") - _median(third, "rss_kib")) / 1024
        if grown > GROWTH_MIB:
            found.append(f"memory grew by {grown:.1f} MiB in the last half")
        for name, level in (("latency_ratio", _best_tenth), ("cpu_us", _median)):
            was, now = level(third, name), level(last, name)
            if now > SLOWER * was:
                found.append(f"{name} was {was:.1f}, then {now:.1f}")
    for name in ("fds", "tasks"):
        was, now = getattr(before, name), getattr(after, name)
        if now > was:
            found.append(f"{name}: {was} before, {now} after")
    return found


def _best_tenth(samples: Sequence[Sample], name: str) -> float:
    """What the best tenth of the moments show, in which others leave the machine alone."""
    values = sorted(getattr(sample, name) for sample in samples)
    return float(values[len(values) // 10])


def _median(samples: Sequence[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


class Soak:
    """The run against one router of a stage."""

    def __init__(self, stage: Stage, folder: Path, log: Path | None) -> None:
        self._stage = stage
        self._router: Router = stage.prefix
        self._folder = folder
        self._log = log.open("w") if log else None
        self._begun_s = time.monotonic()
        self.samples: list[Sample] = []

    def run(self, seconds: float, streams: int) -> list[str]:
        """What was wrong at the end."""
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
            time.sleep(busy_s * (1 - BUSY_SHARE) / BUSY_SHARE)
        after = self._settled(before)
        self._tell(after)
        return verdict(self.samples, before, after)

    def _burst(self) -> Sample:
        """Requests as fast as they go, then streams; what they cost."""
        stage, router = self._stage, self._router
        bodies = self._bodies("requests", stream=False)
        whole = stage.load(router, bodies, CONNECTIONS, BURST_S)
        engine = Router(router.process, int(stage.engines[-1].rpartition(":")[2]))
        direct = stage.load(engine, bodies, CONNECTIONS, DIRECT_S)
        paced = self._bodies("streams", stream=True)
        streams = stage.load(router, paced, 2 * CONNECTIONS, 20, STREAMS_PACE)
        sample = self._look()
        sample.latency_p50_us = round(whole.latency_p50_us, 1)
        sample.latency_ratio = round(whole.latency_p50_us / direct.latency_p50_us, 2)
        sample.cpu_us = round(whole.router_s / whole.answered * 1e6, 1)
        sample.requests, sample.events = whole.answered, streams.events
        return sample

    def _idle_streams(self, count: int, before: Sample) -> None:
        """Hold so many streams that have said one thing, and print what one costs."""
        url = f"http://{self._stage.engines[0]}/gap/{IDLE_GAP_US}"
        urllib.request.urlopen(url, timeout=5).close()
        command = [str(self._stage.load_program), "-p", str(self._router.port), "-c", str(count)]
        command += ["-t", "100", "-1", str(self._bodies("streams", stream=True))]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end_s = time.monotonic() + 60
            while (now := self._look()).tasks < before.tasks + count and time.monotonic() < end_s:
                time.sleep(0.2)
            time.sleep(1)
            now = self._look()
        finally:
            load.kill()
            load.wait()
        held = now.tasks - before.tasks
        per_kib = (now.rss_kib - before.rss_kib) / max(held, 1)
        told = {"idle_streams": held, "kib_per_stream": round(per_kib, 1), "fds": now.fds}
        tell(json.dumps(told), self._log)
        self._settled(before)

    def _look(self) -> Sample:
        own = Path("/proc") / str(self._router.process.pid)
        page_url = f"http://127.0.0.1:{self._router.port}/metrics"
        with urllib.request.urlopen(page_url, timeout=30) as answer:
            page = answer.read().decode()
        tasks = re.search(r"^kvrouter:tasks (\S+)$", page, re.MULTILINE)
        assert tasks is not None
        return Sample(
            round(time.monotonic() - self._begun_s, 1),
            kib_of(own / "status", "RssAnon"),
            len(list((own / "fd").iterdir())),
            int(float(tasks[1])),
        )

    def _settled(self, before: Sample | None) -> Sample:
        """The router when its connections have gone, or as it was before, whichever is sooner."""
        end_s = time.monotonic() + SETTLE_S
        while True:
            now = self._look()
            back = before is not None and now.fds <= before.fds and now.tasks <= before.tasks
            if back or time.monotonic() > end_s:
                return now
            time.sleep(0.5)

    def _bodies(self, name: str, *, stream: bool) -> Path:
        path = self._folder / f"soak-{name}.jsonl"
        if not path.exists():
            asked = (
                prompts("ids", SIZES["short"], max_tokens=STREAM_EVENTS, stream=True)
                if stream
                else prompts("ids", SIZES["8 KiB"])
            )
            path.write_text("".join(prompt.body + "\n" for prompt in asked))
        return path

    def _tell(self, sample: Sample) -> None:
        tell(json.dumps(asdict(sample)), self._log)


def main() -> int:
    """Run it; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=2000, help="idle streams to hold first")
    parser.add_argument("--log", type=Path, help="the reports, one JSON object per line")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-soak-")))
        more = ["--index-blocks", str(INDEX_BLOCKS)]
        stage = stack.enter_context(set_stage(folder, with_peer=False, options=more))
        soak = Soak(stage, folder, options.log)
        found = soak.run(options.seconds, options.streams)
        requests = sum(sample.requests for sample in soak.samples)
        events = sum(sample.events for sample in soak.samples)
        tell(json.dumps({"requests": requests, "events": events}), None)
        count = len(soak.samples)
        growth = "looked at" if count >= LEAST_SAMPLES else UNSEEN
        tell(json.dumps({"samples": count, "growth": growth}), None)
        tell(json.dumps({"verdict": found or "well"}), None)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
