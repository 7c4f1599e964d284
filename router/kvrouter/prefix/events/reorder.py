"""Messages of publishers that wait for earlier ones; bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.prefix.events.messages import Batch

HELD_MESSAGES: Final = 4096
"""Messages of one publisher kept at a time."""

_MARKED_BYTES: Final = 96


class Message(NamedTuple):
    """One message of a publisher: its number, its payload as sent, and decoded."""

    sequence: int
    payload: bytes
    batch: Batch


@dataclass(slots=True)
class Budget:
    """Bytes of kept messages of all publishers; those beyond it are dropped, and count as lost."""

    limit_bytes: int
    used_bytes: int = 0


class ReorderBuffer:
    """Messages of one publisher by number; `highest` was sent last, kept or not (-1: none)."""

    __slots__ = ("_budget", "_messages", "highest")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._messages: dict[int, Message] = {}
        self.highest = -1

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, message: Message) -> None:
        """Keep `message` if there is room for it."""
        number, size = message.sequence, len(message.payload)
        self.highest = max(self.highest, number)
        known = self._messages.get(number)
        if known is not None and known.batch.ts < message.batch.ts:
            self.take(number)  # it was of an earlier publisher
        room = self._budget.used_bytes + size <= self._budget.limit_bytes
        if room and number not in self._messages and len(self._messages) < HELD_MESSAGES:
            self._messages[number] = message
            self._budget.used_bytes += size

    def take(self, number: int) -> Message | None:
        """Remove and return the message of that number."""
        message = self._messages.pop(number, None)
        if message is not None:
            self._budget.used_bytes -= len(message.payload)
        return message

    def first(self) -> Message:
        """The message with the lowest number; KeyError: none is kept."""
        return self._messages[min(self._messages, default=-1)]

    def any_before(self, ts: float) -> bool:
        """Whether a kept message was sent before `ts`, by its publisher's clock."""
        return any(message.batch.ts < ts for message in self._messages.values())

    def discard(self, unwanted: Callable[[Message], bool]) -> None:
        """Drop the `unwanted` messages, and know only of the others."""
        for number in [n for n, message in self._messages.items() if unwanted(message)]:
            self.take(number)
        self.highest = max(self._messages, default=-1)


def fingerprint(payload: bytes) -> int:
    """Distinguishes messages of one number; a payload begins with the publisher's clock."""
    return hash((len(payload), payload[:_MARKED_BYTES]))
