"""Runs the store benchmark: rounds go over all contenders in turn, every byte is compared."""

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers_setup import NAMES, Found, find
from benchmarks.store.crew import Client, ClientFailed, Crew, Timed, answers_of, in_step, timed
from benchmarks.store.figures import Cell, Key, Rate, cell, rate
from benchmarks.store.nodes import Halves, Node, Servers
from benchmarks.store.plan import (
    BATCHES,
    MATCH_HASHES,
    MATCHES,
    MIX_STAGE,
    MIXERS,
    RANGED,
    Effort,
    Entry,
    Stage,
)
from benchmarks.wire_rig import loop_ms

MIX, MATCH = "mix", "match"
MATCH_BLOCK_BYTES = 64 << 10


@dataclass
class Results:
    """All measurements, the stores left out and why, and the state of the machine."""

    cells: list[Cell] = field(default_factory=list)
    mixed: list[Rate] = field(default_factory=list)
    matches: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    loops_ms: list[float] = field(default_factory=list)
    placed: str = ""


@dataclass(frozen=True)
class ConnectedEntry:
    """An entry whose clients are connected. Each client has `blocks` blocks."""

    entry: Entry
    key: str
    node: Node
    clients: list[Client]


def measure(effort: Effort, folder: Path) -> Results:
    """All figures. Raises RuntimeError if our store or a lower bound fails; leaves out peers."""
    halves = Halves.pick()
    results = Results(placed=str(halves))
    found: dict[str, Found] = {}
    for name in NAMES:
        try:
            found[name] = find(name)
            results.versions[name] = found[name].version
        except RuntimeError as error:
            results.skipped[name] = str(error)
    with (
        Servers(folder, effort.pool_bytes, found, halves.servers) as hall,
        Crew(folder, found, halves.clients) as crew,
    ):
        run = _Run(effort, crew, hall, results, halves)
        for stage in effort.stages:
            run.stage(stage)
        run.mix()
        run.match()
    return results


class _Run:
    def __init__(
        self, effort: Effort, crew: Crew, hall: Servers, results: Results, halves: Halves
    ) -> None:
        self._effort = effort
        self._crew = crew
        self._hall = hall
        self._results = results
        self._stamps = itertools.count(1)
        self._core = halves.clients[0]

    def stage(self, stage: Stage) -> None:
        """All batches of a stage."""
        print(f"{stage.size}, {stage.clients} client(s) ...", file=sys.stderr, flush=True)
        blocks = self._effort.blocks(stage)
        playing = self._open(RANGED, stage.clients, stage.block_bytes, blocks)
        playing = [one for one in playing if self._tried(one, BATCHES[-1]) is not None]
        runs: dict[tuple[Key, str], list[Timed]] = defaultdict(list)
        for batch in BATCHES:
            for _ in range(self._effort.rounds):
                self._look()
                for one in list(playing):
                    taken = self._tried(one, batch)
                    if taken is None:
                        playing.remove(one)
                        continue
                    for op, figures in taken.items():
                        key = Key(stage.size, op, batch, stage.clients)
                        runs[key, one.entry.name].append(figures)
        moved_bytes = blocks * stage.block_bytes * stage.clients
        self._results.cells += [
            cell(key, name, moved_bytes, taken)
            for (key, name), taken in runs.items()
            if len(taken) == self._effort.rounds
        ]
        self._close(playing)

    def mix(self) -> None:
        """Sustained puts and gets, compared with sustained copies."""
        blocks = self._effort.blocks(MIX_STAGE)
        playing = self._open(MIXERS, MIX_STAGE.clients, MIX_STAGE.block_bytes, blocks)
        self._results.mixed += self._sustained(playing, MIX, self._effort.mix_s)

    def match(self) -> None:
        """Matches of the same prefix, with several numbers of clients."""
        playing: list[ConnectedEntry] = []
        for entry, counts in MATCHES:
            for count in counts:
                playing += self._open([entry], count, MATCH_BLOCK_BYTES, MATCH_HASHES)
        for one in playing:
            in_step(one.clients, "fill", entry=one.key)
        self._results.matches += self._sustained(playing, MATCH, self._effort.match_s)

    def _open(
        self, entries: Iterable[Entry], count: int, block_bytes: int, blocks: int
    ) -> list[ConnectedEntry]:
        playing = []
        for entry in entries:
            if entry.server in self._results.skipped:
                continue
            key = f"{entry.name}/{next(self._stamps)}"
            try:
                node = self._hall.node(entry.server)
                clients = self._crew.clients(entry.environment, count)
                self._seat(ConnectedEntry(entry, key, node, clients), block_bytes, blocks)
                playing.append(ConnectedEntry(entry, key, node, clients))
            except RuntimeError as error:
                self._leave_out(entry, error)
        return playing

    def _seat(self, one: ConnectedEntry, block_bytes: int, blocks: int) -> None:
        seat = {
            "block_bytes": block_bytes,
            "blocks": blocks,
            "server": one.node.address,
            "options": one.entry.options,
        }
        for number, client in enumerate(one.clients):
            client.send(
                "open",
                entry=one.key,
                maker=one.entry.maker,
                memory_bytes=self._effort.memory_bytes(number),
                seat=seat | {"client": number},
            )
        answers_of(one.clients)
        for client in one.clients:
            in_step([client], "warm", entry=one.key)

    def _tried(self, one: ConnectedEntry, batch: int) -> dict[str, Timed] | None:
        """Figures of a put and a get of all blocks; None if the store is left out from now on."""
        if one.entry.server in self._results.skipped:
            return None
        try:
            return self._round(one, batch)
        except ClientFailed as error:
            self._leave_out(one.entry, error)
            return None

    def _round(self, one: ConnectedEntry, batch: int) -> dict[str, Timed]:
        clients, key = one.clients, one.key
        taken = {}
        in_step(clients, "fresh", entry=key, stamp=next(self._stamps))
        if "put" in one.entry.ops:
            taken["put"] = timed(clients, one.node, "run", entry=key, op="put", batch=batch)
        else:
            in_step(clients, "fill", entry=key)
        taken["get"] = timed(clients, one.node, "run", entry=key, op="get", batch=batch)
        in_step(clients, "check", entry=key)
        in_step(clients, "forget", entry=key)
        return taken

    def _sustained(self, playing: list[ConnectedEntry], op: str, seconds: float) -> list[Rate]:
        """Timed slices, whose bytes are compared: of ours and of copies alone, no peer's."""
        runs: dict[tuple[str, int], list[Timed]] = defaultdict(list)
        for number in range(self._effort.rounds + 1):
            self._look()
            for one in playing:
                clients, key = one.clients, one.key
                in_step(clients, "fresh", entry=key, stamp=next(self._stamps))
                figures = timed(clients, one.node, "sustain", entry=key, op=op, seconds=seconds)
                in_step(clients, "check", entry=key)
                if number:  # the first one touches what is left to touch
                    runs[one.entry.name, len(clients)].append(figures)
        self._close(playing)
        return [rate(name, clients, taken) for (name, clients), taken in runs.items()]

    def _close(self, playing: Sequence[ConnectedEntry]) -> None:
        for one in playing:
            try:
                in_step(one.clients, "close", entry=one.key)
            except ClientFailed as error:
                self._leave_out(one.entry, error)

    def _leave_out(self, entry: Entry, error: RuntimeError) -> None:
        """Continue without a peer, and end its clients, which may hang."""
        if not entry.is_peer:
            raise RuntimeError(f"{entry.name}: {error}") from error
        print(f"{entry.server} is left out from here on: {error}", file=sys.stderr)
        self._results.skipped[entry.server] = str(error)
        if entry.environment:
            self._crew.dismiss(entry.environment)

    def _look(self) -> None:
        self._results.loops_ms.append(loop_ms(self._core))
