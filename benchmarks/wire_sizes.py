"""What a request costs the router by the length of its prompt: CPU, and the most memory.

    python -m benchmarks.wire_sizes [--json FILE]

Both legs, store, landing, KV events and exact block hashes, or texts as clients write them. One
router on one core, as in `benchmarks.wire`, with which this shares mock engines, store and load.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.arguments import parser_of, write_figures
from benchmarks.soak import kib_of
from benchmarks.wire import IDS, LEAST, TEXT
from benchmarks.wire_prompts import MARK, Prompt, Shape, prompts, write_bodies
from benchmarks.wire_rig import leave_in_order
from benchmarks.wire_stage import Router, Stage, set_stage

ROUNDS = 5
STORE_MEMORY = "1536MiB"
BYTES_PER_TOKEN: dict[Shape, int] = {"ids": 6, "text": 5}


@dataclass(frozen=True)
class Size:
    """A length of prompts, of which there are `count`, and how they are sent."""

    name: str
    tokens: int
    count: int
    connections: int
    seconds: float

    def asked(self, shape: Shape) -> list[Prompt]:
        """The prompts."""
        return prompts(shape, self.tokens * BYTES_PER_TOKEN[shape], count=self.count)


SIZES = (
    Size("1 KB", 180, 32, 16, 2.0),
    Size("100k tokens", 100_000, 4, 1, 4.0),
    Size("1M tokens", 1_000_000, 1, 1, 10.0),
)
CASES: tuple[tuple[str, Shape], ...] = ((IDS, "ids"), (LEAST, "text"), (TEXT, "text"))


@dataclass(frozen=True)
class Cost:
    """One router under prompts of one size: medians of CPU over the rounds, the most memory."""

    router: str
    size: str
    body_bytes: int
    cpu_ms: float
    most_mib: float
    per_s: float


def most_mib(router: Router) -> float:
    """The most memory that the router has had since `forget_most`."""
    return kib_of(Path(f"/proc/{router.process.pid}/status"), "VmHWM") / 1024


def forget_most(router: Router) -> None:
    """Count from now on (proc_pid_clear_refs(5))."""
    Path(f"/proc/{router.process.pid}/clear_refs").write_text("5")


def measure(stage: Stage, folder: Path) -> Iterator[Cost]:
    """Every size before every router, in rounds; the sizes grow, because memory may stay."""
    routers = {IDS: stage.prefix, LEAST: stage.least_tokens, TEXT: stage.prefix}
    for size in SIZES:
        for case, shape in CASES:
            asked, router = size.asked(shape), routers[case]
            bodies = write_bodies(folder, f"{case} {size.name}".replace(",", ""), asked)
            forget_most(router)
            how = (router, bodies, size.connections, size.seconds)
            samples = [stage.load(*how) for _ in range(ROUNDS)]
            cpu_ms = [each.router_s / each.answered * 1e3 for each in samples]
            yield Cost(
                case,
                size.name,
                len(asked[0].body) - len(MARK),
                round(statistics.median(cpu_ms), 3),
                round(most_mib(router), 1),
                round(statistics.median(each.answered / each.seconds for each in samples), 1),
            )


def run() -> list[Cost]:
    """Start all processes, measure, print and stop them."""
    with tempfile.TemporaryDirectory(prefix="wire-sizes-") as name:
        folder = Path(name)
        more = [p for size in SIZES for _, shape in CASES[:2] for p in size.asked(shape)]
        with set_stage(folder, with_peers=False, store_memory=STORE_MEMORY, more=more) as stage:
            print(f"{'prompt':<14}{'router':<22}{'body KB':>9}{'CPU ms':>10}{'MiB':>8}{'per s':>9}")
            costs = []
            for cost in measure(stage, folder):
                print(
                    f"{cost.size:<14}{cost.router:<22}{cost.body_bytes / 1e3:>9.0f}"
                    f"{cost.cpu_ms:>10.2f}{cost.most_mib:>8.0f}{cost.per_s:>9.1f}",
                    flush=True,
                )
                costs.append(cost)
            return costs


def main() -> int:
    """Exit status: 0 if the figures could be measured, else 2."""
    parser = parser_of("benchmarks.wire_sizes", __doc__)
    arguments = parser.parse_args()
    leave_in_order()
    try:
        costs = run()
    except RuntimeError as error:
        print(f"wire_sizes: {error}", file=sys.stderr)
        return 2
    write_figures(arguments.json, [asdict(cost) for cost in costs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
