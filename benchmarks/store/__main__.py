"""Cost of the store: `python -m benchmarks.store [--quick] [--json FILE]`.

Puts and gets of blocks over shared memory, Unix socket and TCP, each get with and without
verification, compared with memcpy, memcpy fused with CRC32C, raw C sockets, and other stores over
TCP (those that `python -m benchmarks.peers_setup` installed). Client processes begin together;
rounds go over all contenders in turn; the servers have one half of the cores, the clients the
other; all memory is prefaulted; every byte that came back is compared. A call is timed as the
client library offers it: keys, addresses and ranges are made before, the answer is checked after.
Prints GB/s of wall time, latency of calls, and CPU seconds per GB of clients and server together.
"""

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.arguments import parser_of, write_figures
from benchmarks.store.bars import judge
from benchmarks.store.measure import measure
from benchmarks.store.plan import FULL, QUICK
from benchmarks.store.report import as_json, facts, lines, sentence
from benchmarks.wire_rig import leave_in_order


def main() -> int:
    """Exit status: 0 if the figures could be measured, else 2."""
    parser = parser_of("benchmarks.store", __doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute, fewer cells")
    arguments = parser.parse_args()
    leave_in_order()
    begun_s = time.monotonic()
    effort = QUICK if arguments.quick else FULL
    try:
        with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
            results = measure(effort, Path(folder))
    except RuntimeError as error:
        print(f"store: {error}", file=sys.stderr)
        return 2
    machine = facts(results.loops_ms)
    print(*lines(results, judge(results)), sentence(machine), sep="\n")
    seconds = round(time.monotonic() - begun_s, 1)
    told = as_json(results, machine) | {"seconds": seconds, "effort": asdict(effort)}
    write_figures(arguments.json, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
