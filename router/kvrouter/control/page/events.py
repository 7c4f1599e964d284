"""What happened to engines and settings of late, for the status page."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvrouter.control.page.model import EventCard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine
    from kvrouter.engines.pool import EngineChange

KEPT: Final = 50


@dataclass(eq=False)
class Events:
    """The last `KEPT` events."""

    problem: Callable[[Engine], str | None]  # result of an engine's last probe
    wall: Callable[[], float] = time.time  # Unix time

    def __post_init__(self) -> None:
        self._number = 0
        self._events: deque[EventCard] = deque(maxlen=KEPT)
        self._open: set[Engine] = set()  # breakers that opened, and did not close since

    def engine_changed(self, change: EngineChange, engine: Engine) -> None:
        """Note a change of the pool; a breaker that opens again and again is noted once."""
        if change == "breaker open" and engine in self._open:
            return
        if change == "breaker open":
            self._open.add(engine)
        else:
            self._open -= {engine, *engine.all_ranks.values()}
        why = self.problem(engine) if change == "left" else None
        self._add(change, engine.address, engine.server.label, why)

    def reloaded(self, changed: list[str]) -> None:
        """Note that the settings were read again, and which `changed`."""
        self._add("reload", None, "", ", ".join(changed) or "no flag changed")

    def reload_refused(self) -> None:
        """Note that new settings could not be used; why may be no matter for every reader."""
        self._add("reload refused", None, "", "the router keeps its settings; its log says why")

    def cards(self) -> list[EventCard]:
        """The newest first."""
        return list(reversed(self._events))

    def _add(self, kind: str, engine: str | None, label: str, text: str | None) -> None:
        self._number += 1
        card = EventCard(self._number, self.wall(), kind, engine, label or None, text)
        self._events.append(card)
