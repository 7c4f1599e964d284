"""CPU cost of metrics, logs, keys and traces in the router, per request and per event.

    python -m benchmarks.overhead [--quick] [--json FILE]

Three routers: `off` counts nothing, logs no requests, asks for no key and traces nothing; `on` has
metrics, the line per request, `--api-key-file` and traces of 1 % of the requests; `traced` traces
every request. `off` and one of the others get load on one core at the same time, so that other work
of the machine affects both equally: on a shared host, samples one after the other differ by ten
percent, pairs by one. The placement of a process in memory makes one or two percent for its whole
life, so routers are restarted several times. Figures are medians of the CPU time of all threads,
including the exporter, until all traces are sent: the SDK sends every five seconds, so each load is
followed by a pause of that length. A ratio is the median over the pairs of one life, and the mean
over lives. `on` may cost 15 % more than `off`.
Exit status: 0; 1 if it costs more; 2 if nothing could be measured.
"""

import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path

from benchmarks.arguments import parser_of
from benchmarks.wire_prompts import SIZES, prompts
from benchmarks.wire_rig import Cores, Process, kvrouter, leave_in_order
from benchmarks.wire_stage import (
    CONNECTOR,
    DECODE,
    PREFILL,
    Answers,
    Load,
    Router,
    Stage,
    check_legs,
    set_stage,
)
from kvrouter.credentials.caller_keys import file_line
from kvrouter.tools.demo.cluster import free_port

BAR = 1.15
KEY = "sk-overhead-0123456789abcdef0123456789abcdef"
SAMPLED = 0.01
CONNECTIONS = 16
WARM_UP_S = 0.7
GATHER_S = 5.0  # how long the SDK gathers spans by default
REST_S = GATHER_S + 0.3  # until the last traces are sent
STREAMS, PACE_PER_S = 64, 50
OFF, ON, TRACED = "off", "on", "traced"


@dataclass(frozen=True)
class Effort:
    """How much to measure: lives of the routers, and rounds in each."""

    lives: int
    request_rounds: int
    request_s: float
    stream_rounds: int
    stream_s: float


QUICK = Effort(lives=2, request_rounds=2, request_s=1.5, stream_rounds=2, stream_s=1.5)
FULL = Effort(lives=7, request_rounds=3, request_s=2.4, stream_rounds=2, stream_s=2.0)


@dataclass(frozen=True)
class Workload:
    """Bodies and how they are sent; CPU is divided by the number of `unit`s."""

    name: str
    unit: str
    rounds: int
    bodies: Path
    connections: int
    seconds: float
    pace_per_s: int = 0


@dataclass(frozen=True)
class Cell:
    """One workload: medians over the rounds of a life, means over lives."""

    workload: str
    unit: str
    us: dict[str, float]  # CPU per unit, by router
    ratios: dict[str, float]  # to `off`, by router


class _TraceHandler(BaseHTTPRequestHandler):
    """Accepts all traces, as a collector does."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector in this process, on the core of the load."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _TraceHandler)
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def routers(stage: Stage, folder: Path, number: int) -> Iterator[dict[str, Router]]:
    """The three routers in front of the stage's engines and store, started in turns."""
    keys = folder / "keys.yaml"
    keys.write_text(file_line("overhead", KEY) + "\n")
    keys.chmod(0o600)
    silent = [sys.executable, "-m", "benchmarks.overhead_silent", "serve", "--no-access-log"]
    with ExitStack() as stack:
        url = stack.enter_context(collector())
        seen = kvrouter("serve", "--api-key-file", str(keys), "--otlp-traces-endpoint", url)
        started = {}
        commands = [
            (OFF, silent),
            (ON, [*seen, "--otlp-traces-sampling-ratio", str(SAMPLED)]),
            (TRACED, [*seen, "--otlp-traces-sampling-ratio", "1"]),
        ]
        first = number % len(commands)
        for name, command in commands[first:] + commands[:first]:
            port = free_port()
            whole = [*command, "--port", str(port), "--store", stage.store_url]
            whole += ["--prefill", *stage.engines[:PREFILL]]
            whole += ["--decode", *stage.engines[PREFILL : PREFILL + DECODE], *CONNECTOR]
            process = stack.enter_context(Process(name, whole, Cores.pick().router, folder))
            process.await_answer(f"http://127.0.0.1:{port}/health")
            started[name] = Router(process, port)
        yield started


def workloads(folder: Path, effort: Effort) -> list[Workload]:
    """The cheapest request, where overhead matters most, an average one, and paced streams."""
    made = []
    for name in ("short", "8 KiB"):
        path = _write(folder, name, [p.body for p in prompts("ids", SIZES[name])])
        rounds, seconds = effort.request_rounds, effort.request_s
        made.append(Workload(f"{name} request", "request", rounds, path, CONNECTIONS, seconds))
    count = int(PACE_PER_S * effort.stream_s)
    bodies = [p.body for p in prompts("ids", SIZES["short"], max_tokens=count, stream=True)]
    path = _write(folder, "streams", bodies)
    name = f"{STREAMS} streams x {PACE_PER_S}/s"
    rounds, seconds = effort.stream_rounds, 20 + effort.stream_s
    made.append(Workload(name, "event", rounds, path, STREAMS, seconds, PACE_PER_S))
    return made


def _write(folder: Path, name: str, bodies: Sequence[str]) -> Path:
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    path.write_text("".join(body + "\n" for body in bodies))
    return path


def cost_us(answers: Answers, unit: str) -> float:
    """CPU of one request or event."""
    return answers.router_s / (answers.events if unit == "event" else answers.answered) * 1e6


Pair = dict[str, float]
"""CPU us per unit of `off` and another router, loaded together."""


def measure(stage: Stage, folder: Path, effort: Effort) -> list[Cell]:
    """Every workload at every router together with `off`, in each life."""
    plan = workloads(folder, effort)
    lives = [live(stage, folder, plan, number) for number in range(effort.lives)]
    return [cell(each, [pairs[each.name] for pairs in lives]) for each in plan]


def live(
    stage: Stage, folder: Path, plan: Sequence[Workload], number: int
) -> dict[str, list[Pair]]:
    """One life of the routers: pairs by workload."""
    pairs: dict[str, list[Pair]] = {each.name: [] for each in plan}
    with routers(stage, folder, number) as named:
        for name, router in named.items():
            for each in plan[:2]:
                key = "" if name == OFF else KEY
                stage.load(router, each.bodies, each.connections, WARM_UP_S, key=key)
            if name != OFF:  # which counts nothing
                check_legs(router)
        for turn in range(max(each.rounds for each in plan)):
            for each in (each for each in plan if turn < each.rounds):
                for other in (ON, TRACED):
                    loads = {OFF: Load(named[OFF]), other: Load(named[other], KEY)}
                    pairs[each.name].append(pair(stage, each, loads, turn))
    return pairs


def pair(stage: Stage, workload: Workload, loads: dict[str, Load], turn: int) -> Pair:
    """One sample of two routers, started in one order or the other."""
    order = list(loads.items())[:: 1 if turn % 2 else -1]
    found = stage.load_together(
        [load for _, load in order],
        workload.bodies,
        workload.connections,
        workload.seconds,
        workload.pace_per_s,
        rest_s=REST_S,
    )
    costs = (cost_us(answers, workload.unit) for answers in found)
    return dict(zip((name for name, _ in order), costs, strict=True))


def cell(workload: Workload, lives: Sequence[Sequence[Pair]]) -> Cell:
    """Medians over the pairs of a life, means over lives."""

    def mean_of(name: str, value: Callable[[Pair], float]) -> float:
        medians = (statistics.median(value(p) for p in pairs if name in p) for pairs in lives)
        return round(statistics.fmean(medians), 3)

    us = {name: mean_of(name, itemgetter(name)) for name in (OFF, ON, TRACED)}
    ratios = {
        ON: mean_of(ON, lambda pair: pair[ON] / pair[OFF]),
        TRACED: mean_of(TRACED, lambda pair: pair[TRACED] / pair[OFF]),
    }
    return Cell(workload.name, workload.unit, us, ratios)


def bars(cells: Sequence[Cell]) -> dict[str, bool]:
    """Whether the overhead is within its bar, by workload."""
    return {each.workload: each.ratios[ON] <= BAR for each in cells}


def show(cells: Sequence[Cell]) -> None:
    """The table, and each bar."""
    print(f"{'CPU us per unit':<22}{'unit':<10}{OFF:>8}{ON:>8}{'ratio':>8}{TRACED:>9}{'ratio':>8}")
    for each in cells:
        us, ratios = each.us, each.ratios
        print(
            f"{each.workload:<22}{each.unit:<10}{us[OFF]:>8.1f}{us[ON]:>8.1f}{ratios[ON]:>8.3f}"
            f"{us[TRACED]:>9.1f}{ratios[TRACED]:>8.3f}"
        )
    for name, holds in bars(cells).items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}: on <= {BAR:.2f}x off")


def main() -> int:
    """Measure and print; the module describes the exit status."""
    parser = parser_of("benchmarks.overhead", __doc__)
    parser.add_argument("--quick", action="store_true", help="about three minutes and a half")
    parser.add_argument("--json", type=Path, help="write every figure and the bars there")
    arguments = parser.parse_args()
    leave_in_order()
    effort = QUICK if arguments.quick else FULL
    try:
        with tempfile.TemporaryDirectory(prefix="overhead-") as name:
            folder = Path(name)
            with set_stage(folder, with_peers=False) as stage:
                cells = measure(stage, folder, effort)
    except RuntimeError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    show(cells)
    held = bars(cells)
    if arguments.json:
        report = {"effort": asdict(effort), "cells": [asdict(c) for c in cells], "bars": held}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
