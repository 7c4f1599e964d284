"""The effect of the router's plans: balance of decode engines, time to first token, gaps.

    python -m benchmarks.planner [--quick] [--seeds 3] [--baseline COMMAND] [--json FILE]

Real processes: a store, four prefill and four decode engines of `kvrouter sim`, a router. Prefill
engines compute one prompt at a time, 0.1 ms for a token. Decode engines take 30 ms for a token, up
to 90 ms with 64 answers, and a prompt that they compute themselves delays all answers. Requests
arrive at 70 % of the prefill engines' capacity, with bursts of three times as many; a seed
determines them. Every setup gets the same requests, and differences are of equal requests of two
setups. `--baseline` is another router to compare with, as `/old/.venv/bin/python -m kvrouter`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arguments import parser_of
from benchmarks.planner_client import drive
from benchmarks.planner_figures import Figures, Paired, figures, paired
from benchmarks.planner_load import Ask, rate_of_load, requests
from kvrouter.tools.demo.children import KVROUTER, Child, Children
from kvrouter.tools.demo.cluster import free_port, start_store

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES = 4  # of each role
SECONDS_PER_TOKEN = 0.0001
LOAD = 0.7
WARM_UP_S = 10.0  # a cycle of bursts
ENGINE = (
    *("--model", "tiny", "--port", "0", "--block-size", "64", "--kv-bytes-per-token", "16"),
    *("--kv-cache-size", "4096", "--seed", "1"),
    *("--prefill-time-per-token", f"{SECONDS_PER_TOKEN * 1e6:g}us", "--prefill-overhead", "5ms"),
    *("--kv-cache-transfer-time-per-token", "5us"),
)
ROLES = {
    "prefill": ("--max-num-seqs", "1"),
    "decode": (
        *("--max-num-seqs", "64", "--shared-steps", "--inter-token-latency", "30ms"),
        *("--time-factor-under-load", "3"),
    ),
}
BY_PRIORITY = ("--scheduling-policy", "priority")


@dataclass(frozen=True)
class Setup:
    """One router and its prefill engines' flags."""

    name: str
    router: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    program: Sequence[str] = KVROUTER


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    seconds: float
    seeds: int


QUICK, FULL = Effort(20.0, 1), Effort(60.0, 3)

SETUPS = (
    Setup("no priority", ("--prefill-priority", "off", "--prefill-threshold", "0")),
    Setup("priority", ("--prefill-threshold", "0"), BY_PRIORITY),
    Setup("local prefill to 1,024", ("--prefill-threshold", "1024"), BY_PRIORITY),
    Setup("local prefill to 2,048", ("--prefill-threshold", "2048"), BY_PRIORITY),
)


@dataclass(frozen=True)
class Row:
    """One setup over all seeds, and its differences to the previous and to the first setup."""

    setup: str
    figures: Figures
    to_first: Paired | None
    to_former: Paired | None


async def engine(children: Children, role: str, number: int, *flags: str) -> Child:
    """A simulated engine."""
    return await children.start(f"{role}-{number}", "sim", "--role", role, *ENGINE, *flags)


async def run(
    setup: Setup,
    asks: list[Ask],
    folder: Path,
    *,
    warm_up_s: float = WARM_UP_S,
    engines: int = ENGINES,
) -> Figures:
    """Start a setup, send all requests, and measure those after the warm-up."""
    async with Children(folder) as children:
        store = await start_store(children, folder, "256MiB")
        events = f"tcp://127.0.0.1:{free_port()}"
        shared = ("--store", store.urls["kv"], "--zmq-endpoint", events)
        names = {}
        for role, usual in ROLES.items():
            flags = (*shared, *usual, *(setup.prefill if role == "prefill" else ()))
            starts = (engine(children, role, number, *flags) for number in range(engines))
            names[role] = [child.http for child in await asyncio.gather(*starts)]
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--store", store.urls["kv"], "--log-level", "warning"),
            *("--prefill", *names["prefill"], "--decode", *names["decode"]),
            *("--kv-events-bind", events, *setup.router),
            program=setup.program,
        )
        replies, samples = await drive(router.http, asks, names["decode"])
        deaths = children.unexpected_deaths()
        assert not deaths, deaths
    return figures(asks, replies, samples, warm_up_s)


def measure(setups: Sequence[Setup], effort: Effort) -> list[Row]:
    """Measure every setup with every seed, in turns."""
    per_s = rate_of_load(LOAD, ENGINES, SECONDS_PER_TOKEN)
    runs: dict[str, list[Figures]] = {setup.name: [] for setup in setups}
    for seed in range(1, effort.seeds + 1):
        asks = requests(seed, WARM_UP_S + effort.seconds, per_s)
        for setup in setups:
            with tempfile.TemporaryDirectory() as folder:
                found = asyncio.run(run(setup, asks, Path(folder)))
            print(f"seed {seed}, {setup.name}: {found.line()}", flush=True)
            runs[setup.name].append(found)
    rows: list[Row] = []
    for setup in setups:
        whole = Figures.joined(runs[setup.name])
        first = paired(rows[0].figures, whole) if rows else None
        rows.append(
            Row(setup.name, whole, first, paired(rows[-1].figures, whole) if rows else None)
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The figures of all setups, and their differences."""
    lines = [f"{'':26} {Figures.HEAD}"]
    lines += [f"{row.setup:26} {row.figures.line()}" for row in rows]
    lines.append(
        "\nTTFT of the same request, ms: median of the difference, its 90 % interval; mean"
    )
    for row in rows[1:]:
        assert row.to_first is not None
        assert row.to_former is not None
        lines.append(f"{row.setup:26} to the first {row.to_first}; to the former {row.to_former}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = parser_of("benchmarks.planner", __doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a third of the time")
    parser.add_argument("--seeds", type=int, help=f"how many (by default {FULL.seeds})")
    parser.add_argument("--seconds", type=float, help="of each run, after its warm-up")
    parser.add_argument("--baseline", metavar="COMMAND", help="another router, measured first")
    parser.add_argument("--only", nargs="+", metavar="SETUP", help="measure these setups alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    given = parser.parse_args()
    usual = QUICK if given.quick else FULL
    effort = Effort(given.seconds or usual.seconds, given.seeds or usual.seeds)
    setups = [each for each in SETUPS if not given.only or each.name in given.only]
    if given.baseline:
        setups.insert(0, Setup("baseline", program=tuple(shlex.split(given.baseline))))
    rows = measure(setups, effort)
    print(table(rows))
    if given.json:
        told = [{**asdict(row), "figures": row.figures.summary()} for row in rows]
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
