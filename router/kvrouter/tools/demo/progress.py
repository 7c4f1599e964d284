"""Progress of the demo: one line that moves on a terminal, plain lines in a pipe."""

import sys
import time
from typing import TextIO

__all__ = ["Progress"]

_MOVE_S = 0.1


class Progress:
    """`step` says what begins, `count` how far it is, `line` what stays."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty()
        self._moving = ""
        self._moved_s = 0.0
        self._began_s = time.monotonic()

    def line(self, text: str = "") -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self._out, flush=True)

    def step(self, text: str) -> None:
        """Something begins."""
        self._moving = text
        if self._live:
            self._show(text)
        else:
            self.line(f"[{time.monotonic() - self._began_s:5.1f} s] {text}")

    def count(self, done: int, of: int) -> None:
        """How far it is; only a terminal sees it, ten times a second at most."""
        now_s = time.monotonic()
        if self._live and (done == of or now_s - self._moved_s >= _MOVE_S):
            self._moved_s = now_s
            self._show(f"{self._moving} {done}/{of}")

    def _show(self, text: str) -> None:
        self._clear()
        print(text, end="", file=self._out, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=self._out)
