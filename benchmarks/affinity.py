"""How much of the cached KV is found without KV events: `python -m benchmarks.affinity TRACE...`.

    python -m benchmarks.affinity conversation.jsonl.gz agents.npz [--json FILE]

Engines in simulated time, each with a cache of blocks (least recently used) and one prefill at a
time; the router's own policy and index choose among them. Four routers see the same requests:
"exact" hears which blocks engines store and evict; "learnt" knows only where it sent which prompt,
and how large an engine's cache is; "unsized" does not know that either; "blind" takes the engine
with the fewest tokens. Printed are the shares of prompt tokens that engines had cached, the mean
time to the first token, and for each trace the shares of "learnt" relative to those of "exact".
The engines are so fast that half of all tokens would keep them busy for LOAD of the time.

TRACE: as in benchmarks.eviction.
"""

import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.arguments import parser_of
from benchmarks.eviction import BLOCK_TOKENS, Request, read_requests
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.openai.request import BYTES_PER_TOKEN
from kvrouter.prefix.in_flight import InFlightPrefixes, marks_of
from kvrouter.prefix.index import PrefixIndex
from kvrouter.prefix.learnt import MOST_BYTES
from kvrouter.routing.plan import RouteInputs
from kvrouter.routing.policies import make_policy
from kvrouter_store.identity.chain import HASH_BYTES

ROUTERS = ("exact", "learnt", "unsized", "blind")
FLEETS = ((4, 2_000), (4, 8_000), (8, 2_000))  # engines, and blocks that each one caches
LOAD = 0.6
ANSWER_S = 8.0  # from the first token to the last one
ANSWER_TOKENS = 256  # as the router counts an answer of unknown length
INDEX_BLOCKS = 1_000_000
LEAST = 0.95
MOST_BLOCKS = MOST_BYTES // BYTES_PER_TOKEN // BLOCK_TOKENS
"""Of a prompt that are compared where names are learnt."""


@dataclass(frozen=True)
class Cell:
    """One trace on one fleet, by router."""

    trace: str
    engines: int
    cache_blocks: int
    found: dict[str, float]  # share of prompt tokens that were cached
    first_s: dict[str, float]  # mean time to the first token


class Cache:
    """Blocks of one engine; the one that was not used longest leaves."""

    def __init__(self, blocks: int) -> None:
        self._room = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def leading(self, names: Sequence[int]) -> int:
        """How many leading blocks are there."""
        return next((at for at, name in enumerate(names) if name not in self._held), len(names))

    def use(self, names: Sequence[int]) -> list[int]:
        """All of them are there now; returns what left for them."""
        for name in reversed(names):  # the end of a chain leaves first
            self._held[name] = None
            self._held.move_to_end(name)
        excess = max(0, len(self._held) - self._room)
        return [self._held.popitem(last=False)[0] for _ in range(excess)]


@dataclass
class Cluster:
    """A router and its engines in simulated time."""

    router: str
    engines: list[Engine]
    caches: dict[Engine, Cache]
    tokens_per_s: float
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(INDEX_BLOCKS))
    in_flight: InFlightPrefixes = field(default_factory=InFlightPrefixes)
    found: int = 0  # blocks that were cached
    waited_s: float = 0.0  # from arrivals to first tokens
    _free_s: dict[Engine, float] = field(default_factory=dict)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        self._policy = make_policy("least_tokens" if self.router == "blind" else "prefix")

    def run(self, requests: Sequence[Request]) -> None:
        """Take all requests."""
        for at_s, names in requests:
            while self._later and self._later[0][0] <= at_s:
                heapq.heappop(self._later)[2]()
            self._take(at_s, names)

    def _take(self, at_s: float, names: Sequence[int]) -> None:
        """Route a request, prefill it when its engine is free, and end its answer later."""
        hashes = b"".join(name.to_bytes(HASH_BYTES, "big") for name in names)
        if self.router != "exact":
            hashes = hashes[: MOST_BLOCKS * HASH_BYTES]
        plan = self._policy.plan(self._inputs(hashes, len(names)))
        engine, computing = plan.decode, plan.computed_tokens
        tokens, marks = len(names) * BLOCK_TOKENS + ANSWER_TOKENS, marks_of(hashes)
        engine.tokens += tokens
        engine.computing_tokens += computing
        self.in_flight.add(engine, marks)
        held = self.caches[engine].leading(names)
        self.found += held
        evicted = self.caches[engine].use(names)
        begins_s = max(at_s, self._free_s.get(engine, 0.0))
        first_s = begins_s + (len(names) - held) * BLOCK_TOKENS / self.tokens_per_s
        self._free_s[engine] = first_s
        self.waited_s += first_s - at_s

        def computed() -> None:
            engine.computing_tokens -= computing
            if self.router == "exact":
                self.index.credit(engine, hashes)
                self.index.removed(engine, evicted)
            else:
                self.index.guess(engine, hashes, BLOCK_TOKENS)

        def ended() -> None:
            engine.tokens -= tokens
            self.in_flight.remove(engine, marks)

        heapq.heappush(self._later, (first_s, next(self._order), computed))
        heapq.heappush(self._later, (first_s + ANSWER_S, next(self._order), ended))

    def _inputs(self, hashes: bytes, blocks: int) -> RouteInputs:
        held, coming = self.index.match(hashes), dict(self.in_flight.match(hashes))
        exact = self.router == "exact"
        if not exact:
            for engine, found in held.items():
                coming[engine] = max(found, coming.get(engine, 0))
        return RouteInputs(
            prompt_tokens=blocks * BLOCK_TOKENS,
            decode=self.engines,
            exact=exact,
            block_tokens=BLOCK_TOKENS * blocks * HASH_BYTES // len(hashes),
            matches=held if exact else {},
            guesses=coming,
            learnt=not exact,
        )


def measure(name: str, requests: Sequence[Request], engines: int, cache_blocks: int) -> Cell:
    """Every router on one fleet."""
    tokens = BLOCK_TOKENS * sum(len(names) for _, names in requests)
    seconds = max(1.0, requests[-1][0] - requests[0][0])
    tokens_per_s = tokens / 2 / (seconds * engines * LOAD)
    found, first_s = {}, {}
    for router in ROUTERS:
        known = Identity(("m",), kv_tokens=cache_blocks * BLOCK_TOKENS)
        identity = known if router == "learnt" else None
        fleet = [
            Engine(f"10.0.0.{number}:8000", Role.DECODE, identity=identity)
            for number in range(engines)
        ]
        caches = {engine: Cache(cache_blocks) for engine in fleet}
        cluster = Cluster(router, fleet, caches, tokens_per_s)
        cluster.run(requests)
        found[router] = cluster.found * BLOCK_TOKENS / tokens
        first_s[router] = cluster.waited_s / len(requests)
    return Cell(name, engines, cache_blocks, found, first_s)


def relative(cells: Sequence[Cell]) -> float:
    """What the learnt prefixes find in all cells, relative to what exact ones do."""
    learnt, exact = (sum(cell.found[router] for cell in cells) for router in ("learnt", "exact"))
    return learnt / exact if exact else 1.0


def main() -> int:
    """Measure, print, judge."""
    parser = parser_of("benchmarks.affinity", __doc__)
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    arguments = parser.parse_args()
    cells: dict[Path, list[Cell]] = {}
    for path in arguments.traces:
        requests = [(at_s, names) for at_s, names in read_requests(path) if names]
        for engines, blocks in FLEETS:
            cell = measure(path.name, requests, engines, blocks)
            cells.setdefault(path, []).append(cell)
            shown = ", ".join(
                f"{router} {share:.3f} ({cell.first_s[router]:.2f} s)"
                for router, share in cell.found.items()
            )
            print(f"{cell.trace}: {engines} engines of {blocks:,} blocks: {shown}", flush=True)
        print(f"{path.name}: learnt to exact {relative(cells[path]):.3f}")
    if arguments.json is not None:
        rows = [asdict(cell) for found in cells.values() for cell in found]
        arguments.json.write_text(json.dumps(rows))
    return 0 if all(relative(found) >= LEAST for found in cells.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
