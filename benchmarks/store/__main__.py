"""Cost of the store: `python -m benchmarks.store [--quick] [--json FILE]`.

Puts and gets of blocks over shared memory, Unix socket and TCP, each get with and without
verification, compared with memcpy, memcpy fused with CRC32C, raw C sockets, and other stores over
TCP (those that `python -m benchmarks.peers_setup` installed). Client processes begin together;
rounds go over all contenders in turn; the servers have one half of the cores, the clients the
other; all memory is prefaulted; every byte that came back is compared. A call is timed as the
client library offers it: keys, addresses and ranges are made before, the answer is checked after.
Prints GB/s of wall time, latency of calls, and CPU seconds per GB of clients and server together.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arguments import parser_of
from benchmarks.peers_setup import NAMES
from benchmarks.store.bars import judge
from benchmarks.store.machine import facts, sentence
from benchmarks.store.measure import Results, measure
from benchmarks.store.plan import FULL, QUICK
from benchmarks.store.report import read, write
from benchmarks.store.table import lines, markdown


def main() -> int:
    """Exit status: 0 if the figures could be measured, else 2."""
    parser = parser_of("benchmarks.store", __doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute, fewer cells")
    parser.add_argument("--without-peers", action="store_true", help="ours and the floors only")
    parser.add_argument("--json", type=Path, help="write every figure and the bars there")
    parser.add_argument("--read", type=Path, help="measure nothing: show what --json has written")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    arguments = parser.parse_args()
    try:
        results, machine = read(arguments.read) if arguments.read else _measured(arguments)
    except RuntimeError as error:
        print(f"store: {error}", file=sys.stderr)
        return 2
    for line in markdown(results) if arguments.markdown else lines(results, judge(results)):
        print(line)
    print(sentence(machine))
    return 0


def _measured(arguments: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    begun_s = time.monotonic()
    effort = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        results = measure(effort, Path(folder), () if arguments.without_peers else NAMES)
    machine = facts(results.loops_ms)
    if arguments.json:
        seconds = round(time.monotonic() - begun_s, 1)
        write(arguments.json, results, machine, seconds=seconds, effort=asdict(effort))
    return results, machine


if __name__ == "__main__":
    sys.exit(main())
