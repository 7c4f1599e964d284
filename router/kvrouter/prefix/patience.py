"""Which engines tell token ids in time. One that was late is asked again after a pause, by one.

Synchronous, over an injected clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter_store.connection.reconnect import BackOff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.engines.engine import Engine

LEAST_S: Final = 0.3
MOST_S: Final = 0.8
BYTES_PER_S: Final = 400_000
"""Of a prompt's text, beyond `LEAST_S`: a tenth of the time in which an engine computes it, at
10,000 tokens per second. Token ids are worth a part of what they save, and a busy host needs some
time even for a short prompt."""
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
FORGOTTEN_S: Final = 600.0
"""After its pause an engine that nobody asks any more is forgotten."""


def patience_s(prompt_bytes: int) -> float:
    """How long a request waits for the token ids of its prompt."""
    return min(MOST_S, LEAST_S + prompt_bytes / BYTES_PER_S)


@dataclass(slots=True)
class _Late:
    pause: BackOff = field(default_factory=lambda: BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    on_trial: bool = False


class QuickEngines:
    """Remembers who was late. A trial is due after each pause, which doubles while trials fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late: dict[str, _Late] = {}  # by address

    def of(self, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of `engines` that can be waited for."""
        if not self._late:
            return engines
        return [engine for engine in engines if engine.address not in self._late]

    def trial(self, engines: Sequence[Engine]) -> Engine | None:
        """One of `engines` whose pause is over: it is to be asked now, and not waited for."""
        for engine in engines if self._late else ():
            late = self._late.get(engine.address)
            if late is not None and not late.on_trial and not late.pause.remaining_s(self._clock()):
                late.on_trial = True
                return engine
        return None

    def was_late(self, engine: Engine) -> bool:
        """It did not answer in time; returns whether it usually did."""
        late, now = self._late.get(engine.address), self._clock()
        if late is not None and not late.on_trial:
            return False  # it was asked before
        if late is None:
            known = self._late.items()
            self._late = {a: o for a, o in known if o.pause.retry_at + FORGOTTEN_S > now}
        new = self._late.setdefault(engine.address, _Late())
        new.on_trial = False
        new.pause.failed(now)
        return late is None

    def was_quick(self, engine: Engine) -> bool:
        """It answered in time, or refused; returns whether it had been late."""
        late = self._late.get(engine.address)
        if late is None or not late.on_trial:
            return False  # its latest word counts: it was late since it was asked this
        del self._late[engine.address]
        return True
