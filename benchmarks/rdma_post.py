"""The Python cost of a block over RDMA without a device: all but the library's own post.

`python -m benchmarks.rdma_post [--json FILE]`. Needs pyverbs; `make rdma` installs it and runs
this. Work requests and completions are real; the queue accepts lists and completes each at once.
New work requests are measured for comparison. Bar `rdma_post`: at most 2 us a block; exit status 1
if it is missed, 2 without pyverbs.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from benchmarks.arguments import parser_of
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.rdma.base import Copy, LinkType, RdmaUnavailable
from kvrouter_store.rdma.device import load_pyverbs
from kvrouter_store.rdma.ports import Port
from kvrouter_store.rdma.queue_pair import VerbsQueuePair

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 4096
BLOCK_BYTES = 64 * 1024
ROUNDS = 15
BAR_US = 2.0


class Limits:
    """Properties of a device and its port."""

    max_qp_rd_atom = 16
    max_qp_init_rd_atom = 16
    active_mtu = 5
    max_msg_sz = 1 << 30


class Queue:
    """A completion channel, a completion queue and a queue pair that only accept lists."""

    def __init__(self, completion: Callable[..., Any]) -> None:
        self._completion = completion
        self._tag = 0
        self.fd = self.qp_num = 1
        self.native = None

    def post_send(self, head: object) -> None:
        """Complete the list at once."""
        self._tag += 1

    def poll(self, number: int) -> "tuple[int, Sequence[Any]]":
        """The completion of the last list, as pyverbs makes one."""
        return 1, [self._completion(wr_id=self._tag, status=0)]

    def close(self) -> None:
        """Do nothing: nothing is open."""


class IdleVerbs:
    """The names of pyverbs, without those that need a device."""

    def __init__(self, names: ModuleType) -> None:
        from pyverbs.cq import WC  # noqa: PLC0415 - absent where pyverbs is

        self._names = names
        queue = Queue(WC)
        self.CompletionChannel = self.CQ = self.queue_pair = lambda *_: queue
        self.change_state = lambda *_: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, name)


class IdleDevice:
    """The part of a device that a queue pair needs."""

    port = Port("none", 1, LinkType.ETHERNET, 1, bytes(16), 0, routed=True)
    context: Any = None
    domain: Any = None
    attributes: Any = Limits
    port_attributes: Any = Limits


def best_us(run: Callable[[], object]) -> float:
    """Microseconds for each block, of the best round."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return 1e6 * min(took) / BLOCKS


def new_requests(names: ModuleType, copies: list[Copy]) -> None:
    """A new entry and a new work request for each copy, freed afterwards."""
    for copy in copies:
        entry = names.SGE(copy.local_address, copy.length, copy.lkey)
        request = names.SendWR(opcode=names.WRITE, num_sge=1, sg=[entry])
        request.set_wr_rdma(copy.rkey, copy.remote_address)
        request.close()
        entry.close()


def measure() -> dict[str, float]:
    """The figures."""
    names = load_pyverbs()
    device = IdleDevice()
    pair = VerbsQueuePair(cast("ModuleType", IdleVerbs(names)), device, lambda _: None)
    copies = [Copy(1 + place * BLOCK_BYTES, 7, 1 << 40, 9, BLOCK_BYTES) for place in range(BLOCKS)]
    here, there = socket.socketpair()
    with here, there:
        write_us = best_us(lambda: pair.write(copies, Deadline(60), here.fileno()))
        requests, signalled = pair.work_requests, pair.signalled_completions
        read_us = best_us(lambda: pair.read(copies, Deadline(60), here.fileno()))
    pair.close()
    return {
        "write_us_per_block": write_us,
        "read_us_per_block": read_us,
        "copy_us_per_block": best_us(
            lambda: [Copy(place, 7, 1 << 40, 9, BLOCK_BYTES) for place in range(BLOCKS)]
        ),
        "new_requests_us_per_block": best_us(lambda: new_requests(names, copies)),
        "work_requests_per_block": requests / (BLOCKS * ROUNDS),
        "signalled_completions_per_block": signalled / (BLOCKS * ROUNDS),
    }


def main() -> None:
    """Measure, print, and write the figures to --json."""
    parser = parser_of("benchmarks.rdma_post", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    arguments = parser.parse_args()
    try:
        figures = measure()
    except RdmaUnavailable as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    bars = {"rdma_post": figures["write_us_per_block"] <= BAR_US}
    print(f"{BLOCKS} blocks of {BLOCK_BYTES // 1024} KiB in one call, {os.uname().machine}")
    print(f"  posted and completed: write {figures['write_us_per_block']:.2f} us a block, ", end="")
    print(f"read {figures['read_us_per_block']:.2f} us")
    print(f"  describing it (a Copy): {figures['copy_us_per_block']:.2f} us a block")
    print(f"  new work requests instead: {figures['new_requests_us_per_block']:.2f} us a block")
    print(f"  {figures['work_requests_per_block']:g} work requests and ", end="")
    print(f"{figures['signalled_completions_per_block']:g} signalled completions a block")
    print(f"  bar rdma_post: {'met' if bars['rdma_post'] else 'MISSED'} (at most {BAR_US:g} us)")
    if arguments.json:
        result = {"figures": figures, "bars": bars}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(bars.values()) else 1)


if __name__ == "__main__":
    main()
