"""Messages in their order that are still to be applied, a few milliseconds at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvrouter.prefix.events.messages import Batch, Event
    from kvrouter.prefix.events.publisher import Publisher

TURN_S: Final = 0.002


@dataclass(eq=False)
class Backlog:
    """Applies the messages of all publishers in the order in which they were added.

    What it holds is bounded by its callers: they take no message while `run` says that some is
    left, so that there is one message, and those that it released (see `Budget`).
    """

    clock: Callable[[], float]  # seconds, monotonic
    _waiting: deque[tuple[Publisher, Iterator[Event | None]]] = field(default_factory=deque)

    def add(self, publisher: Publisher, batch: Batch) -> None:
        """Apply a message of `publisher` after those that wait."""
        self._waiting.append((publisher, batch.pieces()))

    def drop(self, publisher: Publisher) -> None:
        """Forget the messages of `publisher`."""
        self._waiting = deque(each for each in self._waiting if each[0] is not publisher)

    def run(self) -> bool:
        """Apply messages for TURN_S; returns whether any is left."""
        until = self.clock() + TURN_S
        while self._waiting:
            publisher, pieces = self._waiting[0]
            for piece in pieces:
                publisher.act(piece)
                if self.clock() > until:
                    return True
            if self._waiting and self._waiting[0][1] is pieces:
                self._waiting.popleft()
        return False
