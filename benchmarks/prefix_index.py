"""What the index of the engines' caches costs: memory, and the processor's time.

Its chains have 8,192 blocks (131,072 tokens). A few engines hold each of most, whole or in part
("few"), all engines hold some ("all"), and some in part ("ends"). It matches whole chains.
"""

from __future__ import annotations

import random
import time
from array import array
from pathlib import Path

from benchmarks.arguments import parser_of, write_figures
from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.index import PrefixIndex

CHAIN, SHARED, FEW = 8192, 4, 5
"""Blocks of a chain, chains that all engines hold, engines that hold another chain at most."""
MATCHES = 2000
STATM = Path("/proc/self/statm")


def _fill(index: PrefixIndex, engines: list[Engine], kind: str, chains: list[array[int]]) -> int:
    """Store the chains; returns how many blocks were stored."""
    stored = 0
    for chain in chains:
        few = random.sample(engines, min(len(engines), random.randint(1, FEW)))
        for engine in few if kind == "few" else engines:
            part = kind == "ends" or (kind == "few" and random.random() < 0.5)
            stored += len(held := chain[: random.randint(1, CHAIN)] if part else chain)
            index.stored(engine, held)
    return stored


def _match_us(index: PrefixIndex, chains: list[array[int]]) -> list[float]:
    """Times of matches, the shortest first."""
    asked = [b"".join(bytes(24) + i.to_bytes(8) for i in chain) for chain in chains]
    taken_us = []
    for number in range(MATCHES):
        start_s = time.thread_time()
        index.match(asked[number % len(asked)])
        taken_us.append(1e6 * (time.thread_time() - start_s))
    return sorted(taken_us)


def measure(holders: int, blocks: int) -> dict[str, float]:
    """Figures of an index with room for `blocks` blocks that `holders` engines hold."""
    engines = [Engine(f"engine:{number + 1}", Role.DECODE) for number in range(holders)]
    chains = [array("Q", random.randbytes(8 * CHAIN)) for _ in range(blocks // CHAIN)]
    kinds = {"all": chains[:SHARED], "ends": chains[SHARED:][:SHARED], "few": chains[2 * SHARED :]}
    before, start_s, index = STATM.read_text(), time.thread_time(), PrefixIndex(blocks)
    stored = sum(_fill(index, engines, kind, several) for kind, several in kinds.items())
    found: dict[str, float] = {"holders": holders, "blocks": len(index)}
    found["stored_per_s"] = stored / (time.thread_time() - start_s)
    pages = int(STATM.read_text().split()[1]) - int(before.split()[1])
    found["bytes_a_block"] = pages * 4096 / len(index)
    found["bytes_a_block_at_most"] = index.memory_bytes / blocks
    found["forgotten"] = index.forgotten
    for kind, several in kinds.items():
        taken_us = _match_us(index, several[:200])
        found |= {f"{kind}_p{p}_us": taken_us[MATCHES * p // 100] for p in (50, 99)}
    return found


def main() -> None:
    """Measure, and print a column for each number of engines."""
    parser = parser_of("benchmarks.prefix_index", __doc__)
    parser.add_argument("--holders", type=int, nargs="+", default=[16, 127, 1024, 2048])
    parser.add_argument("--blocks", type=int, default=10_000_000)
    options = parser.parse_args()
    rows = [measure(holders, options.blocks) for holders in options.holders]
    for name in rows[0]:
        print(f"{name:24}" + "".join(f"{row[name]:16,.1f}" for row in rows))
    write_figures(options.json, rows)


if __name__ == "__main__":
    main()
