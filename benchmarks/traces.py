"""What it costs to export a trace: CPU of all threads, beside OpenTelemetry's SDK.

    python -m benchmarks.traces [--quick] [--json FILE]

`encode` makes one request of a batch of traces, `send` also has a collector in another process take
it. The SDK's exporter takes turns with kvrouter's over the same traces; figures are medians, a
ratio is the median of the ratios of each round. kvrouter's may take a quarter of the SDK's time.
Exit status: 0; 1 where it takes more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from tests.fakes.sdk_spans import sdk_request, sdk_spans

from benchmarks.overhead import collector
from kvrouter.engine import Engine, Role
from kvrouter.openai import parse
from kvrouter.passage import Passage
from kvrouter.tracing.attributes import end_request
from kvrouter.tracing.encode import Encoder
from kvrouter.tracing.exporter import BATCH_TRACES
from kvrouter.tracing.otlp import OtlpSender, resource_of
from kvrouter.tracing.trace import Attributes, Trace, Tracing

BAR = 0.25
BODY = b'{"model":"m","prompt":[1,2,3],"max_tokens":16,"temperature":0.5,"top_p":0.9,"stream":true}'
PREFILL, DECODE = Engine("10.0.0.1:8000", Role.PREFILL), Engine("10.0.0.3:8000", Role.DECODE)
PLAN: Attributes = {"kvrouter.plan": "prefill", "kvrouter.hit_store_tokens": 0}
RELEASE, INSTANCE = "0", "127.0.0.1:8000"
BATCHES = (64, BATCH_TRACES)
QUICK, FULL = 20, 60

Work = Callable[[list[Trace]], object]


@dataclass(frozen=True)
class Cell:
    """One way at one size of batches: medians over the rounds, in us of CPU per trace."""

    way: str
    batch: int
    sdk_us: float
    own_us: float
    ratio: float


def noted(count: int) -> list[Trace]:
    """Traces of requests as the router notes them: text tokenised, both legs, a landing awaited."""
    traces: list[Trace] = []
    tracing = Tracing(1.0, "follow", traces.append)
    for number in range(count):
        trace, _ = tracing.begin({})
        assert trace is not None
        exchange: Any = SimpleNamespace(method="POST", path="/v1/completions", status=200)
        begun_s = trace.request.begun_s
        passage = Passage(exchange, exchange, f"367ca8d648c5c378-{number}", b"", begun_s)
        passage.trace, passage.attempts, passage.generated = trace, 1, 16
        passage.request = parse(BODY, "completion", 1)
        passage.outcome, passage.first_s, passage.landed_blocks = "length", begun_s + 0.03, 14
        passage.prefill_engine, passage.decode_engine = PREFILL.address, DECODE.address
        passage.tokenised(begun_s)
        trace.note("kvrouter.plan", begun_s, time.monotonic(), PLAN)
        passage.leg("kvrouter.prefill", PREFILL)
        trace.spans[-1].end()
        found: Attributes = {"kvrouter.outcome": "landed", "kvrouter.blocks": 14}
        trace.note("kvrouter.landing", begun_s, time.monotonic(), found)
        span, _ = passage.leg("kvrouter.decode", DECODE)
        assert span is not None
        passage.end_decode(span)
        now_s = time.monotonic()
        end_request(passage, trace.request, (0.0, 0.0, 1e-4, 0.01, 2e-4, now_s - begun_s), now_s)
        tracing.take(trace)
    return traces


@contextmanager
def taker() -> Iterator[str]:
    """A collector in a process of its own; the URL of its traces."""
    command = [sys.executable, "-m", "benchmarks.traces", "--take"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:  # a build that is made anew when it is imported says so first
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.stdin.close()


def take() -> None:
    """Be that collector until nobody is there any more."""
    with collector() as url:
        print(f"{url}/v1/traces", flush=True)
        sys.stdin.read()


def cpu_us(work: Work, traces: list[Trace]) -> float:
    """CPU of this process per trace, all threads."""
    begun_ns = time.process_time_ns()
    work(traces)
    return (time.process_time_ns() - begun_ns) / 1e3 / len(traces)


def measure(batch: int, rounds: int, url: str) -> list[Cell]:
    """Both exporters in turns, over batches of so many traces; the first round is not counted.

    Raises:
        RuntimeError: the collector at `url` did not take them.
    """
    resource = resource_of(INSTANCE, RELEASE)
    encoder, sender = Encoder(resource.attributes, RELEASE), OtlpSender(url, INSTANCE)
    exporter = OTLPSpanExporter(endpoint=url)

    def sent(traces: list[Trace]) -> None:
        if not sender.send(traces):
            raise RuntimeError("the collector did not take what was sent")

    pairs: dict[str, tuple[Work, Work]] = {
        "encode": (
            lambda traces: sdk_request(traces, resource, RELEASE).SerializeToString(),
            encoder.encode,
        ),
        "send": (lambda traces: exporter.export(sdk_spans(traces, resource, RELEASE)), sent),
    }
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in pairs}
    for _ in range(rounds + 1):
        traces = noted(batch)
        for way, (theirs, own) in pairs.items():
            samples[way].append((cpu_us(theirs, traces), cpu_us(own, traces)))
    return [cell(way, batch, each[1:]) for way, each in samples.items()]


def cell(way: str, batch: int, samples: Sequence[tuple[float, float]]) -> Cell:
    """Medians of the samples, each the SDK's and kvrouter's."""
    sdk, own = (round(statistics.median(each), 1) for each in zip(*samples, strict=True))
    ratio = statistics.median(own / sdk for sdk, own in samples)
    return Cell(way, batch, sdk, own, round(ratio, 3))


def main() -> int:
    """Measure and tell; see the module for the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some seconds")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--take", action="store_true", help="be the collector of a measurement")
    arguments = parser.parse_args()
    if arguments.take:
        take()
        return 0
    rounds = QUICK if arguments.quick else FULL
    with taker() as url:
        cells = [each for batch in BATCHES for each in measure(batch, rounds, url)]
    print(f"{'CPU us per trace':<18}{'batch':>6}{'SDK':>8}{'kvrouter':>10}{'ratio':>8}")
    for each in cells:
        print(f"{each.way:<18}{each.batch:>6}{each.sdk_us:>8}{each.own_us:>10}{each.ratio:>8}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in cells], indent=2) + "\n")
    return 0 if all(each.ratio <= BAR for each in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
