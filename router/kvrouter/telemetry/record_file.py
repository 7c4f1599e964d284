"""The file of `--record`: a thread writes it, and a rotation into a second file bounds it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from kvrouter_store.log import LogWriter

log = logging.getLogger(__name__)


class RecordFile(LogWriter):
    """Takes lines without blocking. Those that the disk does not take are dropped, and counted.

    With half of `max_bytes`, or if it was there before, the file becomes PATH.1 in place of the
    former one, and a new one begins. OSError: it cannot be opened.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        super().__init__(self._append)
        self._path, self._most_bytes = path, max_bytes // 2
        self._fd = self._begin()

    def _begin(self) -> int:
        if os.path.isfile(self._path) and os.path.getsize(self._path):  # /dev/null stays
            os.replace(self._path, f"{self._path}.1")
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._bytes, self._failed = 0, False
        return fd

    def _append(self, lines: memoryview) -> int:
        """Write all lines, or as many as an empty file takes; or none of them."""
        if len(lines) > self._most_bytes:
            lines = lines[: bytes(lines[: self._most_bytes]).rfind(b"\n") + 1] or lines
        try:
            if self._bytes + len(lines) > self._most_bytes:
                before, self._fd = self._fd, self._begin()
                os.close(before)
            left = lines
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            with suppress(OSError):  # a line that was begun would spoil the next one
                os.ftruncate(self._fd, self._bytes)
            if not self._failed:
                log.error("--record %s: lines are lost: %s", self._path, error.strerror)
            self._failed = True
            raise
        self._bytes += len(lines)
        return len(lines)
