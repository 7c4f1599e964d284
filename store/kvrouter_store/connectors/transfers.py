"""Transfers that an engine submits and asks about later: submitted, running, finished, taken."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

log = logging.getLogger("vllm.kvstore")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Finished(Generic[R]):
    """A transfer that ended: what its works returned, and seconds since it was submitted.

    A work that raised, or was not begun before close(), returned nothing.
    """

    job_id: int
    results: list[R]
    seconds: float


@dataclass
class _Transfer(Generic[R]):
    job_id: int
    open: int  # works that have not ended
    begun: float = field(default_factory=time.monotonic)
    results: list[R] = field(default_factory=list)


def copying_threads() -> int:
    """As many as copy well: three quarters of the cores, 4 to 16. One alone copies 5 GB/s."""
    cores = len(os.sched_getaffinity(0))
    return max(4, min(16, cores * 3 // 4))


class Transfers(Generic[R]):
    """Runs transfers in threads of its own; its methods are for one thread.

    Every transfer that was submitted is finished once, when the last of its works has ended.

    news: set whenever one has finished.
    """

    def __init__(self, threads: int, name: str, news: threading.Event) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[Future[None]] = set()
        self._finished: deque[Finished[R]] = deque()  # appended to by the threads
        self._lock = threading.Lock()
        self._news = news

    def submit(self, job_id: int, works: Sequence[Callable[[], Sequence[R]]]) -> None:
        """Have it done, with as many works at a time as there are threads; returns at once."""
        works = works or [tuple]  # nothing to do is finished too
        transfer: _Transfer[R] = _Transfer(job_id, len(works))
        futures = [self._pool.submit(self._run, transfer, work) for work in works]
        with self._lock:
            self._running.update(futures)
        for future in futures:
            future.add_done_callback(lambda done: self._ended(transfer, done))

    def take(self) -> list[Finished[R]]:
        """What has finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def drain(self) -> None:
        """Wait until nothing runs or waits: each work has a deadline of its own."""
        with self._lock:
            running = list(self._running)
        wait(running)

    def close(self) -> None:
        """Let what runs end, begin nothing more, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, transfer: _Transfer[R], work: Callable[[], Sequence[R]]) -> None:
        results: Sequence[R] = ()
        try:
            results = work()
        except Exception:
            log.exception("a part of a transfer failed")
        finally:
            self._end(transfer, results)

    def _ended(self, transfer: _Transfer[R], done: Future[None]) -> None:
        if done.cancelled():
            self._end(transfer, ())
        with self._lock:
            self._running.discard(done)

    def _end(self, transfer: _Transfer[R], results: Sequence[R]) -> None:
        with self._lock:
            transfer.results += results
            transfer.open -= 1
            if transfer.open:
                return
        seconds = time.monotonic() - transfer.begun
        self._finished.append(Finished(transfer.job_id, transfer.results, seconds))
        self._news.set()
