"""A client process of the store benchmark: `python -m benchmarks.store.worker`.

Reads one JSON command a line on standard input, and answers each with one line. It imports only
the standard library and a contender: it runs in the environments of the peers too.
"""

import ctypes
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from array import array
from typing import Any

from benchmarks.store.contender import BATCH_BLOCKS, Contender, Memory, Seat

STAMP_BYTES = 16


class Worker:
    """The contenders of one client, and the memory that they share."""

    def __init__(self) -> None:
        self._contenders: dict[str, Contender] = {}
        self._memory: tuple[Memory, Memory] | None = None
        self._landed: dict[int, range] = {}  # blocks by the first of them: the last to land there
        self._libc = ctypes.CDLL(None)
        self._libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command; its answer, or {"error": why}."""
        try:
            found: dict[str, Any] = getattr(self, command.pop("do"))(**command) or {}
            return found
        except Exception as error:  # whatever a client library raises is its answer
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def open(self, entry: str, maker: str, memory_bytes: int, seat: dict[str, Any]) -> None:
        """Make a contender: `maker` is MODULE:CLASS. The memory is made with the first one."""
        if self._memory is None:
            self._memory = Memory(memory_bytes), Memory(memory_bytes)
        source, landing = self._memory
        module, _, name = maker.partition(":")
        made = getattr(importlib.import_module(module), name)
        self._contenders[entry] = made(Seat(source=source, landing=landing, **seat))

    def warm(self, entry: str) -> None:
        """Let a contender touch its memory."""
        self._contenders[entry].warm()

    def fresh(self, entry: str, stamp: int) -> None:
        """Change the bytes of every block, and clear the landing memory."""
        seat = self._contenders[entry].seat
        size = seat.block_bytes
        mark = stamp.to_bytes(STAMP_BYTES // 2, "little")
        for block in range(seat.blocks):
            sent = seat.sent(block)
            text = mark + (seat.client << 32 | block).to_bytes(STAMP_BYTES // 2, "little")
            sent[:STAMP_BYTES] = sent[size - STAMP_BYTES :] = text
        self._libc.memset(seat.landing.address, 0, size * seat.blocks)
        self._landed.clear()

    def fill(self, entry: str) -> None:
        """Put every block, without timing."""
        contender = self._contenders[entry]
        blocks = contender.seat.blocks
        for first in range(0, blocks, BATCH_BLOCKS):
            contender.put(first, min(BATCH_BLOCKS, blocks - first))

    def run(self, entry: str, op: str, batch: int, start_s: float) -> dict[str, Any]:
        """Move every block once, `batch` of them in a call; the time of each call.

        Arguments are made before the first call, and answers are checked after the last. Between
        two calls there is only a reading of the clock.
        """
        contender = self._contenders[entry]
        calls = contender.calls(op, batch)
        taken = array("q", bytes(8 * len(calls)))
        answers: list[object] = [None] * len(calls)
        clock = time.perf_counter_ns
        _await(start_s)
        cpu_ns, begun = time.process_time_ns(), clock()
        last = begun
        for number, call in enumerate(calls):
            answers[number] = call()
            now = clock()
            taken[number] = now - last
            last = now
        cpu_ns = time.process_time_ns() - cpu_ns
        for answer in answers:
            contender.look(op, batch, answer)
        if op == "get":
            self._land(range(contender.seat.blocks))
        return {"begun": begun, "ended": last, "cpu_ns": cpu_ns, "calls": taken.tolist()}

    def sustain(self, entry: str, op: str, seconds: float, start_s: float) -> dict[str, Any]:
        """Repeat an operation for a time; the number of units."""
        contender = self._contenders[entry]
        clock = time.perf_counter_ns
        units, turn = 0, 0
        _await(start_s)
        cpu_ns, begun = time.process_time_ns(), clock()
        end = begun + int(seconds * 1e9)
        while clock() < end:
            done, landed = contender.repeat(op, turn)
            units += done
            turn += 1
            self._land(landed)
        ended, cpu_ns = clock(), time.process_time_ns() - cpu_ns
        return {"begun": begun, "ended": ended, "cpu_ns": cpu_ns, "units": units}

    def _land(self, blocks: range) -> None:
        """Note the blocks that landed, in place of earlier ones."""
        self._landed[blocks.start] = blocks

    def check(self, entry: str) -> dict[str, Any]:
        """Compare every byte that landed since `fresh` with the source."""
        contender = self._contenders[entry]
        contender.land()
        seat = contender.seat
        compared = 0
        for block in itertools.chain(*self._landed.values()):
            at = block * seat.block_bytes
            sent, landed = seat.source.address + at, seat.landing.address + at
            if self._libc.memcmp(sent, landed, seat.block_bytes):
                raise ValueError(_difference(seat, block))
            compared += seat.block_bytes
        return {"compared": compared}

    def forget(self, entry: str) -> None:
        """Delete the client's blocks in the store."""
        self._contenders[entry].forget()

    def close(self, entry: str) -> None:
        """Close a contender."""
        self._contenders.pop(entry).close()


def _difference(seat: Seat, block: int) -> str:
    """How the bytes of `block` differ from those that were put."""
    sent, landed = bytes(seat.sent(block)), bytes(seat.landed(block))
    places = [at for at, (a, b) in enumerate(zip(sent, landed, strict=True)) if a != b]
    first = places[0]
    return (
        f"other bytes came back than were put: client {seat.client}, block {block} of "
        f"{seat.blocks}, {len(places)} bytes from {first} to {places[-1]}, there "
        f"{landed[first:][:STAMP_BYTES].hex()} in the place of {sent[first:][:STAMP_BYTES].hex()}, "
        f"it begins with {landed[:STAMP_BYTES].hex()} in the place of {sent[:STAMP_BYTES].hex()}"
    )


def _await(start_s: float) -> None:
    """Wait until a time of the clock that all clients share."""
    left_s = start_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


def main() -> int:
    """Answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do so elsewhere
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
