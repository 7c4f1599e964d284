"""What the demo prints: progress, times from its clients, tokens from the engines' metrics."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub
from statistics import median, quantiles
from typing import TextIO

from tabulate import tabulate

from kvrouter.tools.demo.workload import Reply

_BY_SOURCE = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE
)
_WRONG = re.compile(r"^kvsim:wrong_blocks_total\{.*\} (\S+)$", re.MULTILINE)

_REDRAW_S = 0.1


class Progress:
    """One line that changes on a terminal, plain lines in a pipe.

    `step` says what begins, `count` how far it is, `line` what stays on the screen.
    """

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


@dataclass(frozen=True)
class Counted:
    """Prompt tokens of an engine by the source of their KV, and loaded blocks that were wrong."""

    computed: int = 0
    own: int = 0
    store: int = 0
    wrong_blocks: int = 0

    @classmethod
    def read(cls, exposition: str) -> "Counted":
        """The figures of an engine's /metrics."""
        found = {source: int(float(value)) for source, value in _BY_SOURCE.findall(exposition)}
        return cls(
            found.get("local_compute", 0),
            found.get("local_cache_hit", 0),
            found.get("external_kv_transfer", 0),
            sum(int(float(value)) for value in _WRONG.findall(exposition)),
        )

    @property
    def total(self) -> int:
        """All prompt tokens whose KV the engine needed."""
        return self.computed + self.own + self.store

    def share(self, tokens: int) -> float:
        """So many tokens as a share of all prompt tokens; 0 if there are none."""
        return tokens / self.total if self.total else 0.0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(*map(sub, astuple(self), astuple(other)))


def ttft_line(name: str, replies: Sequence[Reply]) -> str:
    """Median and 95th percentile of the time to first token of the answers without problems."""
    times = [reply.ttft_s for reply in replies if not reply.problem]
    if not times:
        return f"{name:<6} no answer"
    late = quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    tokens = round(sum(reply.prompt_tokens for reply in replies) / len(replies))
    return (
        f"{name:<6} {len(replies):>4} requests of about {tokens} prompt tokens:  TTFT median "
        f"{median(times) * 1000:6.1f} ms   p95 {late * 1000:6.1f} ms"
    )


def speedup(cold: Sequence[Reply], warm: Sequence[Reply]) -> float:
    """The median time to first token of `cold` over that of `warm`; 0 if one has no answer."""
    pair = [[reply.ttft_s for reply in each if not reply.problem] for each in (cold, warm)]
    return median(pair[0]) / median(pair[1]) if all(pair) else 0.0


def source_table(engines: Mapping[str, Counted], notes: Mapping[str, str]) -> str:
    """A line for each engine and one for their sum: tokens computed, cached, and loaded."""
    rows = [
        (name, counted.computed, counted.own, counted.store, notes.get(name, ""))
        for name, counted in (*engines.items(), ("all", sum(engines.values(), Counted())))
    ]
    heads = ("prompt tokens", "computed", "own cache", "from store", "")
    return tabulate(rows, heads, tablefmt="plain", intfmt=",")
