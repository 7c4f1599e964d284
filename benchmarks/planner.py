"""The effect of the router's plans: balance of decode engines, time to first token, gaps.

    python -m benchmarks.planner [--quick] [--json FILE]

Real processes: a store, four prefill and four decode engines of `kvrouter sim`, a router. Prefill
engines compute one prompt at a time, 0.1 ms for a token. Decode engines take 30 ms for a token, up
to 90 ms with 64 answers, and a prompt that they compute themselves delays all answers. Requests
arrive at 70 % of the prefill engines' capacity, with bursts of three times as many; a seed
determines them. Every setup gets the same requests, and differences are of equal requests of two
setups.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.arguments import parser_of, write_figures
from benchmarks.planner_client import drive
from benchmarks.planner_figures import Figures, Paired, figures, paired
from benchmarks.planner_load import Ask, rate_of_load, requests
from kvrouter.tools.demo.children import Children, free_port, start_store

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


QUICK, FULL = (20.0, 1), (60.0, 3)  # seconds of each run after its warm-up, seeds
SETUPS = (
    Setup("no priority", ("--prefill-priority", "off", "--prefill-threshold", "0")),
    Setup("priority", ("--prefill-threshold", "0"), BY_PRIORITY),
    Setup("local prefill to 1,024", ("--prefill-threshold", "1024"), BY_PRIORITY),
    Setup("local prefill to 2,048", ("--prefill-threshold", "2048"), BY_PRIORITY),
    Setup("planner", ("--policy", "planner")),
)


@dataclass(frozen=True)
class Row:
    """One setup over all seeds, and its differences to the previous one."""

    setup: str
    figures: Figures
    to_former: Paired | None


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
            more = setup.prefill if role == "prefill" else ()
            flags = ("sim", "--role", role, *ENGINE, *shared, *usual, *more)
            starts = (children.start(f"{role}-{n}", *flags) for n in range(engines))
            names[role] = [child.http for child in await asyncio.gather(*starts)]
        router = await children.start(
            "router",
            *("serve", "--port", "0", "--store", store.urls["kv"], "--log-level", "warning"),
            *("--prefill", *names["prefill"], "--decode", *names["decode"]),
            *("--kv-events-bind", events, *setup.router),
        )
        replies, samples = await drive(router.http, asks, names["decode"])
        deaths = children.unexpected_deaths()
        assert not deaths, deaths
    return figures(asks, replies, samples, warm_up_s)


def measure(setups: Sequence[Setup], seconds: float, seeds: int, load: float = LOAD) -> list[Row]:
    """Measure every setup with every seed, in turns."""
    per_s = rate_of_load(load, ENGINES, SECONDS_PER_TOKEN)
    runs: dict[str, list[Figures]] = {setup.name: [] for setup in setups}
    for seed in range(1, seeds + 1):
        asks = requests(seed, WARM_UP_S + seconds, per_s)
        for setup in setups:
            with tempfile.TemporaryDirectory() as folder:
                found = asyncio.run(run(setup, asks, Path(folder)))
            said = (f"{name} {value:.2f}" for name, value in found.summary().items())
            print(f"seed {seed}, {setup.name}:", *said, flush=True)
            runs[setup.name].append(found)
    rows: list[Row] = []
    for setup in setups:
        whole = Figures.joined(runs[setup.name])
        rows.append(Row(setup.name, whole, paired(rows[-1].figures, whole) if rows else None))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The figures of all setups, and their differences."""
    found = [row.figures.summary() for row in rows]
    figures = [(name, *(each[name] for each in found)) for name in found[0]]
    heads = ["", *(row.setup for row in rows)]
    lines = [tabulate(figures, heads, tablefmt="plain", floatfmt=".2f")]
    lines += ["", "TTFT of the same request, ms: median of the difference, its 90 % interval; mean"]
    return "\n".join(lines + [f"{row.setup:26} to the former {row.to_former}" for row in rows[1:]])


def main() -> None:
    """Measure and print."""
    parser = parser_of("benchmarks.planner", __doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a third of the time")
    parser.add_argument("--load", type=float, default=LOAD, help="of the prefill engines' capacity")
    given = parser.parse_args()
    rows = measure(SETUPS, *(QUICK if given.quick else FULL), given.load)
    print(table(rows))
    told = [{**asdict(row), "figures": row.figures.summary()} for row in rows]
    write_figures(given.json, told)


if __name__ == "__main__":
    main()
