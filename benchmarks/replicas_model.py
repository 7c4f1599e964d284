"""How routers spread legs over engines if they learn each other's load late, in virtual time.

The router's own pool, policy and `Peers` decide. Engines compute one prompt after the other, at
10,000 tokens/s. Routers learn the requests in flight of the others after a tick and 1 ms.
`python -m benchmarks.replicas_model` prints the waiting time for several ways to count that load.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.arguments import parser_of
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.replicas.group import TICK_S
from kvrouter.replicas.messages import State
from kvrouter.replicas.peers import Peers
from kvrouter.routing.plan import RouteInputs
from kvrouter.routing.policies.least_tokens import LeastTokens

if TYPE_CHECKING:
    from collections.abc import Callable

RATE_TOKENS_S = 10_000.0
HOP_S = 0.001


@dataclass(frozen=True)
class Way:
    """One way to share load.

    Attributes:
        name: for the table.
        routers: how many.
        tick_s: seconds between two reports of a router's load; 0 for none.
        offset: whether each router begins with another one of equal engines.
        expected: whether each assumes that the others do the same, until they report.
    """

    name: str
    routers: int
    tick_s: float = 0.0
    offset: bool = False
    expected: bool = False


@dataclass
class World:
    """Engines, routers, and future events."""

    way: Way
    engines: int
    seed: int
    now: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    legs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.free_at = {f"engine:{k}": 0.0 for k in range(1, self.engines + 1)}
        self.random = random.Random(self.seed)
        self.routers = [Replica(self, k) for k in range(self.way.routers)]

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Schedule `what`."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, what))

    def run(self, requests: int, load: float) -> None:
        """Let that many requests arrive at random; engines are busy for the share `load`."""
        mean_tokens, when = 2000.0, 0.0
        for _ in range(requests):
            when += self.random.expovariate(load * self.engines * RATE_TOKENS_S / mean_tokens)
            tokens = int(self.random.choice((500, 1000, 1500, 2000, 2000, 2500, 4500)))
            router = self.random.choice(self.routers)
            self.at(when, lambda router=router, tokens=tokens: router.serve(tokens))  # type: ignore[misc]
        end = when
        for router in self.routers:
            if self.way.tick_s:
                self.at(self.random.uniform(0, self.way.tick_s), lambda r=router: r.tick(end))  # type: ignore[misc]
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()


class Replica:
    """One router: its pool and its policy."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.id = f"{number:016x}"
        self.pool = EnginePool(lambda: world.now)
        for address in world.free_at:
            self.pool.join(self.pool.add(address, Role.DECODE), Identity(("m",)))
        self.policy = LeastTokens()
        if world.way.offset:
            self.policy._turn = world.random.randrange(1000)
        self.peers = Peers(self.pool, lambda: world.now)

    def serve(self, tokens: int) -> None:
        """Send one request to the engine that the policy names."""
        world = self.world
        inputs = RouteInputs(tokens, self.pool.engines(Role.DECODE))
        engine = self.policy.plan(inputs).decode
        ticket = self.pool.reserve(engine, tokens)
        if world.way.expected:
            also = tokens * (world.way.routers - 1)
            self.pool.set_remote_tokens(engine, engine.remote_tokens + also)
        begin = max(world.now, world.free_at[engine.address])
        world.free_at[engine.address] = begin + tokens / RATE_TOKENS_S
        world.waits_s.append(begin - world.now)
        world.legs[engine.address] = world.legs.get(engine.address, 0) + tokens
        world.at(world.free_at[engine.address], ticket.release)

    def tick(self, end: float) -> None:
        """Report to the others."""
        world = self.world
        load = {e.address: e.tokens - e.remote_tokens for e in self.pool.all()}
        state = State("", 0, {name: tokens for name, tokens in load.items() if tokens})
        for other in world.routers:
            if other is not self:
                world.at(world.now + HOP_S, lambda o=other: o.receive(self.id, state))  # type: ignore[misc]
        if world.now < end:
            world.at(world.now + world.way.tick_s, lambda: self.tick(end))

    def receive(self, router: str, state: State) -> None:
        """Count the requests in flight of another router."""
        self.peers.update(router, state)
        if self.world.way.expected:
            for engine in self.pool.all():
                self._recount(engine)

    def _recount(self, engine: Engine) -> None:
        remote = sum(peer.load.get(engine.address, 0) for peer in self.peers)
        self.pool.set_remote_tokens(engine, remote)


def figures(way: Way, engines: int, load: float, requests: int) -> tuple[float, float, float]:
    """Mean and 99th percentile of the wait in ms, and the imbalance of tokens in %."""
    world = World(way, engines, seed=7)
    world.run(requests, load)
    waits = sorted(world.waits_s)
    legs = list(world.legs.values())
    spread = (max(legs) - min(legs)) / (sum(legs) / engines)
    mean = 1000 * sum(waits) / len(waits)
    return mean, 1000 * waits[int(0.99 * len(waits))], 100 * spread


def main() -> None:
    """Print the table."""
    parser = parser_of("benchmarks.replicas_model", __doc__)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--engines", type=int, default=8)
    args = parser.parse_args()
    ways = [Way("one router", 1)]
    for routers, ticks in ((2, (0.005, 0.02, 0.1, 0.5)), (4, (0.005,))):
        ways.append(Way(f"{routers}, each counts its own", routers))
        ways += [
            Way(f"{routers}, told every {tick_s * 1000:g} ms{more}", routers, tick_s, offset, guess)
            for tick_s in ticks
            for more, offset, guess in (
                ("", False, False),
                (", own turns", True, False),
                (", own turns, others expected alike", True, True),
            )
            if guess is offset or tick_s == TICK_S
        ]
    print(f"{'':56} {'load 0.5':>22} {'load 0.8':>22} {'load 0.95':>22}")
    print(f"{'':56}" + f" {'mean ms':>8} {'p99':>6} {'%':>6}" * 3)
    for way in ways:
        cells = [figures(way, args.engines, load, args.requests) for load in (0.5, 0.8, 0.95)]
        row = "".join(f" {mean:8.1f} {p99:6.0f} {spread:6.2f}" for mean, p99, spread in cells)
        print(f"{way.name:56}{row}", flush=True)


if __name__ == "__main__":
    main()
