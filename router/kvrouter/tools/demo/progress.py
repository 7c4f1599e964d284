"""The demo's progress: one line that changes on a terminal, plain lines in a pipe."""

import sys
import time
from typing import TextIO

_REDRAW_S = 0.1


class Progress:
    """`step` says what begins, `count` how far it is, `line` what stays on the screen."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._live = out.isatty()
        self._step = ""
        self._drawn_s = 0.0
        self._began_s = time.monotonic()

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        self._draw(f"{text}\n")

    def step(self, text: str) -> None:
        """Begin a step."""
        self._step = text
        self._draw(text if self._live else f"[{time.monotonic() - self._began_s:5.1f} s] {text}\n")

    def count(self, done: int, of: int) -> None:
        """Show on a terminal how far the step is, at most ten times a second."""
        now_s = time.monotonic()
        if self._live and (done == of or now_s - self._drawn_s >= _REDRAW_S):
            self._drawn_s = now_s
            self._draw(f"{self._step} {done}/{of}")

    def _draw(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._live else text, end="", file=self._out, flush=True)
