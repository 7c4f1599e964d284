"""Transfers that an engine submits and asks about later: submitted, running, finished, taken."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Finished(Generic[R]):
    """A transfer that ended: what it returned (None where it raised), and how long it took."""

    job_id: int
    result: R | None
    seconds: float


class Transfers(Generic[R]):
    """Runs transfers in threads of its own; its methods are for one thread.

    Every transfer that was submitted is finished once: also one that raises, and one that close()
    found not begun.

    news: set whenever one has finished.
    """

    def __init__(self, threads: int, name: str, news: threading.Event) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[Future[None]] = set()
        self._finished: deque[Finished[R]] = deque()  # appended to by the threads
        self._lock = threading.Lock()
        self._news = news

    def submit(self, job_id: int, transfer: Callable[[], R]) -> None:
        """Have it done; returns at once."""
        future = self._pool.submit(self._run, job_id, transfer)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(lambda done: self._ended(job_id, done))

    def take(self) -> list[Finished[R]]:
        """What has finished since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def drain(self) -> None:
        """Wait until nothing runs or waits: each transfer has a deadline of its own."""
        with self._lock:
            running = list(self._running)
        wait(running)

    def close(self) -> None:
        """Let what runs end, begin nothing more, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job_id: int, transfer: Callable[[], R]) -> None:
        begun = time.monotonic()
        result = None
        try:
            result = transfer()
        finally:
            self._end(Finished(job_id, result, time.monotonic() - begun))

    def _ended(self, job_id: int, done: Future[None]) -> None:
        if done.cancelled():
            self._end(Finished(job_id, None, 0.0))
        with self._lock:
            self._running.discard(done)

    def _end(self, finished: Finished[R]) -> None:
        self._finished.append(finished)
        self._news.set()
