"""Tasks that LMCache submits from its threads, and asks about later by their number.

LMCache never waits in a submit. An eventfd tells it that tasks of a kind have results; each result
is taken once.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

MAX_WAITING = 256
MAX_RESULTS = 4096

R = TypeVar("R")


class Results(Generic[R]):
    """What tasks of one kind returned. Safe in threads. Owns an eventfd: close() ends it.

    Results that nobody takes are dropped, the oldest first: LMCache gives requests up.
    """

    def __init__(self, most: int = MAX_RESULTS) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._most = most
        self._results: dict[int, R] = {}
        self._lock = threading.Lock()
        self._closed = False

    def put(self, task: int, result: R) -> None:
        """The result of a task. Nothing after close()."""
        with self._lock:
            if self._closed:
                return
            self._results[task] = result
            if len(self._results) > self._most:
                del self._results[next(iter(self._results))]
            os.eventfd_write(self.fd, 1)

    def take(self, task: int) -> R | None:
        """The result of a task, once; None while it has none."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, R]:
        """All results that nobody has taken, by task."""
        with self._lock:
            taken, self._results = self._results, {}
        return taken

    def close(self) -> None:
        """Close the eventfd. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Workers:
    """A few threads, and a bounded number of tasks that wait for one of them."""

    def __init__(self, threads: int, name: str, most: int = MAX_WAITING) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._room = threading.BoundedSemaphore(threads + most)

    def submit(self, task: Callable[[], None]) -> bool:
        """Have it done; returns at once. False where too many wait, and after close()."""
        if not self._room.acquire(blocking=False):
            return False
        try:
            future = self._pool.submit(task)
        except RuntimeError:  # closed
            self._room.release()
            return False
        future.add_done_callback(lambda _: self._room.release())
        return True

    def close(self) -> None:
        """Let what runs end, begin nothing more, and end the threads. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
