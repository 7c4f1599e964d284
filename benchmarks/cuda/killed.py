"""A process is killed while the GPU writes into the store's memory: when does the last byte change?

The store learns of the end by a pipe that the dead process had open. If bytes change after that, a
slot of the store may only be used again later, or GPUs must never write into slots.
"""

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.cuda.check import Answer
from benchmarks.cuda.gpu import Gpu
from benchmarks.cuda.pool import mapped, sealed_file, tensor_at
from benchmarks.cuda.registration import registered

SIZE = 256 << 20
ROUNDS = 3
RUNS_S, WATCH_S, LOOK_S = 0.2, 1.0, 0.002
START_DEADLINE_S, END_DEADLINE_S = 30.0, 10.0
SAMPLES = 4096  # places in the memory that are compared
COPIES_AHEAD = 200


@dataclass(frozen=True)
class Ending:
    """Seconds from the kill until the pipe was closed, and from then to the last change."""

    pipe_closed_s: float
    last_change_s: float


def check(gpu: Gpu, rounds: int = ROUNDS) -> Answer:
    """Passed if no byte changes once the pipe is closed."""
    del gpu  # the child has one of its own
    command = [sys.executable, "-m", "benchmarks.cuda.killed"]
    endings = [killed(command, SIZE) for _ in range(rounds)]
    late = max(ending.last_change_s for ending in endings)
    closed = max(ending.pipe_closed_s for ending in endings)
    figures = {"late_s": late, "pipe_closed_s": closed, "rounds": rounds}
    if late:
        says = f"the GPU wrote for {late * 1000:.0f} ms more after the pipe of the dead was closed"
    else:
        says = f"no byte changed after the pipe of the dead was closed ({closed * 1000:.0f} ms)"
    return Answer(not late, says, figures)


def killed(command: list[str], size: int) -> Ending:
    """Run a writer, kill it while it writes, and watch the memory.

    The writer gets the numbers of the memory's file, of a pipe's end, and the memory's size; it
    prints a line once it writes.
    """
    with sealed_file(size) as file:
        pipe, its_end = os.pipe()
        try:
            arguments = [str(each) for each in (file, its_end, size)]
            writer = subprocess.Popen(
                [*command, *arguments], pass_fds=(file, its_end), stdout=subprocess.PIPE
            )
            os.close(its_end)
            try:
                return _watched(writer, file, pipe, size)
            finally:
                writer.kill()
                writer.wait(END_DEADLINE_S)
                assert writer.stdout is not None
                writer.stdout.close()
        finally:
            os.close(pipe)


def _watched(writer: "subprocess.Popen[bytes]", file: int, pipe: int, size: int) -> Ending:
    assert writer.stdout is not None
    if not select.select([writer.stdout], [], [], START_DEADLINE_S)[0]:
        raise RuntimeError("the writer did not begin in time")
    if not writer.stdout.readline():
        raise RuntimeError("the writer ended before it wrote")
    with mapped(file, size, writable=False) as address:
        sampled = tensor_at(address, size)[:: size // SAMPLES]
        before = sampled.clone()
        time.sleep(RUNS_S)
        if torch.equal(sampled, before):
            raise RuntimeError("the writer does not write")
        begun = time.monotonic()
        os.kill(writer.pid, signal.SIGKILL)
        if not select.select([pipe], [], [], END_DEADLINE_S)[0]:
            raise RuntimeError("the pipe of the dead was not closed in time")
        closed = time.monotonic()
        return Ending(closed - begun, _last_change_s(sampled))


def _last_change_s(sampled: torch.Tensor) -> float:
    """Seconds from now to the last change within WATCH_S; 0 if there is none."""
    begun, last, seen = time.monotonic(), 0.0, sampled.clone()
    while time.monotonic() < begun + WATCH_S:
        time.sleep(LOOK_S)
        if not torch.equal(sampled, seen):
            last, seen = time.monotonic() - begun, sampled.clone()
    return last


def write_until_killed(file: int, pipe: int, size: int) -> None:
    """The writer: keeps a queue of copies from the GPU into the memory full, all of them other."""
    del pipe  # it stays open until this process ends
    parent = os.getppid()
    device = torch.device("cuda")
    pages = torch.zeros(size, dtype=torch.uint8, device=device)
    with mapped(file, size) as address, registered(address, size):
        memory = tensor_at(address, size)
        told = False
        while os.getppid() == parent:
            for _ in range(COPIES_AHEAD):
                pages += 1
                memory.copy_(pages, non_blocking=True)
            if not told:
                print("writing", flush=True)
                told = True
            torch.cuda.synchronize()


if __name__ == "__main__":
    write_until_killed(*map(int, sys.argv[1:]))
