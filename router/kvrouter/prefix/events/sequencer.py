"""The messages of one publisher, put in order: duplicates, gaps, restarts, replays.

A synchronous state machine over an injected clock. It knows no socket and no event.

The publishers of vLLM and SGLang number messages from 0 and keep the last of them for replays, but
a number does not name its publisher: after a restart they begin at 0 again. So a replay begins one
message before what is missing, and that one must be the one that was applied. Numbers of store
nodes begin with their life: see `COUNT_BITS`.

Promises: `output` gets each message once and in order, and an engine counts as exact only while
nothing can be missing. A change must keep these, each of which was a fault:
- The first answer to a replay that shows a restart is a beginning, and the rest of it is applied.
- While a replay brings new messages the reason is told at once, not at the next tick: a later one
  may remove what an earlier one stored.
- A replay that broke off behind new messages leaves the engine distrusted until it is whole.
Tried: to know a restart by its first number alone. A node whose new life had exactly the expected
number passed for one that goes on; so lives stand in the upper bits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrouter.prefix.events.confidence import Reason
from kvrouter_store.events.publisher import COUNT_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.prefix.events.messages import Batch
    from kvrouter.prefix.events.publisher import Publisher

REORDER_S: Final = 0.25  # without replays: how long missing messages may still come by themselves
REMEMBERED: Final = 512
"""Fingerprints kept, to distinguish a duplicate from another publisher's message."""
TRIES: Final = 3  # replays in a row without a new message, after which what is missing is given up
RETRY_S: Final = 1.0  # between two replays that were not answered; doubled each time
CERTAIN_ANSWERS: Final = 900
"""Beyond so many answers the last but one may be dropped: ZMQ queues 1,000."""
CHECK_S: Final = 30.0
"""After so long without a message the publisher is asked for what may be missing."""
HELD_MESSAGES: Final = 4096  # messages of one publisher kept at a time
_MARKED_BYTES: Final = 96


@dataclass(slots=True, eq=False)
class Sequencer:
    """The message order of one publisher."""

    output: Publisher  # acts on the messages
    budget: Budget  # shared with the other publishers
    clock: Callable[[], float]  # seconds, monotonic
    next: int | None = None  # number of the message to be applied next; None: nothing is known
    complete: bool = False  # whether all messages were applied, from 0 or an emptied cache on
    missing: Reason = Reason.LATE  # the reason while it is not complete
    gap: bool = False  # whether messages before those kept are missing
    unverified: bool = False  # whether messages may have been lost unnoticed
    asking: bool = False  # whether a replay is in flight
    _held: ReorderBuffer = field(init=False)
    _marks: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _last_ts: float = 0.0
    _start: int = 0  # of the replay in flight
    _answers: int = 0  # messages that it brought
    _progress: int | None = None  # `next` when it was requested
    _tries: int = 0
    _short: bool = False  # whether a replay has shown that the first messages are no longer kept
    _whole: bool = False  # whether the replay in flight is for older messages, and optional
    _whole_at: float = 0.0
    _retry_at: float | None = None
    _give_up_at: float | None = None
    _seen: int | None = None  # `next` at the last look
    _quiet_since: float = 0.0

    def __post_init__(self) -> None:
        self._held = ReorderBuffer(self.budget)

    @property
    def reason(self) -> Reason:
        """How far the messages of this publisher are known."""
        if self.gap:
            return Reason.GAP
        if self.unverified:
            return Reason.CUT
        if self.next is None:
            return Reason.NO_EVENTS
        return Reason.COMPLETE if self.complete else self.missing

    def begin(self) -> None:
        """Request what the publisher has sent so far."""
        if self.next is None and not self.asking:
            self._ask()

    def receive(self, message: Message) -> None:
        """Take a message, in any order and any number of times."""
        if self.next is None:
            self._first(message)
        elif _life(message.sequence) != _life(self.next):
            self._restarted(message, replayed=False)
        elif message.sequence == self.next:
            if self._held.any_before(message.batch.ts):
                self._restarted(message, replayed=False)
                return
            self._advance(message)
            if self.gap:
                self._release()
        elif message.sequence < self.next:
            self._old(message, replayed=False)
        else:
            self._ahead(message)

    def replayed(self, message: Message) -> None:
        """Take a message of the replay in flight."""
        if not self.asking:
            return
        number, first = message.sequence, self._answers == 0
        self._answers += 1
        if first and self._start == 0:
            self._short = not _is_first(number)
        if self.next is not None and _life(number) != _life(self.next):
            self._restarted(message, replayed=True)
            return
        if first and _is_first(number) and self.next is not None and not self.complete:
            same = message.batch.ts <= self._last_ts
            known = max(self._held.highest, self.next - 1) if same else -1
            self._begin_anew(message)  # the publisher still has all of its messages
            self._held.highest = max(self._held.highest, known)
            return
        if number == self.next and self._held.any_before(message.batch.ts):
            self._restarted(message, replayed=True)
        elif number == self.next:
            self._opened()  # until the replay ends: a later message may remove these blocks
            self._advance(message)
            self._release()
        elif self.next is None:
            self._start_at(message, Reason.LATE)
        elif number < self.next:
            self._old(message, replayed=True)
        elif first:  # the publisher no longer has what is missing
            self._lose(message)
        else:
            self._opened()  # an answer was dropped
            self._held.add(message)

    def replay_ended(self) -> None:
        """The publisher has repeated all that it keeps."""
        if not self.asking:
            return
        now = self._quiet_since = self.clock()
        self.asking = False
        if not self._answers and self._start and self._ask(0):
            return  # it has nothing that late: it was restarted, or it keeps nothing
        if self._answers > CERTAIN_ANSWERS and self._ask():
            return
        if self._answers or not self.next:
            self.unverified = False
            self._whole_at = min(self._whole_at, now + CHECK_S)  # it answers again
        else:
            self._tries = TRIES  # it keeps nothing
        if self.next is None and self._held.highest < 0:
            self.next, self.complete = 0, True  # it has sent nothing yet
        elif self.next is None or self.next <= self._held.highest:
            self._again()
        else:
            self._closed()
        self.output.changed()

    def replay_failed(self) -> None:
        """The publisher did not answer, or not to the end."""
        if not self.asking:
            return
        now, self.asking = self.clock(), False
        if self.next != self._progress:
            self._tries = 0
            self._pursue()
        elif self._tries + 1 < TRIES:
            self._retry_at = now + RETRY_S * 2.0**self._tries
            self._tries += 1
        else:
            self._tries, self._quiet_since = 0, now
            self.output.count("unanswered", self._start, self._start)
            if self.next is not None and self.next > self._held.highest and not self._whole:
                self.unverified, self._seen = True, self.next
            self._give_up()
            self._whole_at = now + 10 * CHECK_S
        self.output.changed()

    def cut(self) -> None:
        """Its connection broke: messages may be lost."""
        if self.next is not None:
            self.unverified, self._seen = True, self.next
            self.output.changed()

    def check(self) -> bool:
        """Request what may have been lost; returns whether it can be asked."""
        return self.asking or self._retry_at is not None or self._ask()

    def reset(self, since_ts: float = inf) -> None:
        """Forget the publisher, except kept messages from `since_ts` of its clock on."""
        self._held.discard(lambda held: held.batch.ts < since_ts)
        self._marks.clear()
        self.next = self._give_up_at = self._retry_at = self._seen = None
        self.complete = self.gap = self.unverified = self.asking = False
        self.missing, self._last_ts, self._tries = Reason.LATE, 0.0, 0
        self._short, self._whole_at = False, self.clock() + CHECK_S

    def relearn(self) -> None:
        """Request all messages again: what they established is void, though none was lost."""
        self.complete, self.missing = False, Reason.LATE
        self._ask(0)
        self.output.changed()

    def tick(self) -> None:
        """Do what is due."""
        now = self.clock()
        if self.next != self._seen:
            self._seen, self._quiet_since = self.next, now
            if self.unverified and not self.asking:
                self.unverified = False  # it goes on where the connection broke: nothing is lost
                self.output.changed()
        if self._give_up_at is not None:
            if now >= self._give_up_at:
                self._give_up()
                self.output.changed()
        elif self._retry_at is not None:
            if now >= self._retry_at:
                self._pursue()
        elif not self.asking and now - self._quiet_since >= CHECK_S:
            self._quiet_since = now
            self._ask()
        elif not (self.asking or self.complete or self._short) and now >= self._whole_at:
            self._whole_at = now + CHECK_S
            self._whole = self.next is not None and self._ask(0)

    def _advance(self, message: Message) -> None:
        self.next = message.sequence + 1
        self._marks.append(fingerprint(message.payload))
        self._last_ts = message.batch.ts
        self.output.apply(message)

    def _release(self) -> None:
        """Apply kept messages up to the next gap."""
        assert self.next is not None
        kept = self._held.take(self.next - 1)
        if kept is not None and fingerprint(kept.payload) != self._marks[-1]:
            self._old(kept, replayed=False)  # the replay was of a publisher that is gone
            return
        while (message := self._held.take(self.next)) is not None:
            self._advance(message)
        if self.next > self._held.highest and not self.asking:
            self._closed()
            self.output.changed()

    def _opened(self) -> None:
        """Messages are missing or to be expected: nothing is trusted from here on."""
        if not self.gap:
            self.gap = True
            self.output.changed()

    def _closed(self) -> None:
        """Nothing is missing between the known messages."""
        self.gap, self._give_up_at, self._retry_at, self._tries = False, None, None, 0

    def _first(self, message: Message) -> None:
        if _is_first(message.sequence):
            self._start_at(message, Reason.LATE)
            return
        self._held.add(message)
        if not self.asking and self._retry_at is None and not self._ask():
            self._start_at(message, Reason.LATE)

    def _start_at(self, message: Message, missing: Reason) -> None:
        """Begin at `message`; what came before is unknown."""
        number, ts = message.sequence, message.batch.ts
        self.complete, self.missing = _is_first(number), missing
        self._marks.clear()
        later = range(number, _life(number) + 1 << COUNT_BITS)
        self._held.discard(lambda held: held.sequence not in later or held.batch.ts < ts)
        self._advance(message)
        self.gap = True
        self._release()
        if self.gap and self._retry_at is None:
            self._pursue()
        self.output.changed()

    def _old(self, message: Message, *, replayed: bool) -> None:
        """A number from before: a duplicate, or a message of a publisher that restarted."""
        assert self.next is not None
        number = message.sequence
        place = len(self._marks) - (self.next - number)
        if place >= 0:
            same = self._marks[place] == fingerprint(message.payload)
        else:  # too old for fingerprints: the publisher's clock decides
            same = message.batch.ts <= self._last_ts
        if same:
            if not replayed or place < 0:
                self.output.count("duplicates", number, number)
            return
        self._restarted(message, replayed=replayed)

    def _restarted(self, message: Message, *, replayed: bool) -> None:
        """`message` is of a publisher that began anew.

        Its number may be one that is missing from the publisher before it. The clock distinguishes
        them: held messages have higher numbers, and a publisher sends these later.
        """
        if self.next:  # else nothing was known but that nothing had been sent
            self.output.count("restarts", message.sequence, self.next)
        # Asked from a number of another life on, it has repeated all that it keeps.
        if replayed and (self._start == 0 or _life(message.sequence) != _life(self._start)):
            self._begin_anew(message)
        else:
            self.output.forget()
            self.reset(message.batch.ts)
            self.receive(message)
            self.output.changed()

    def _begin_anew(self, message: Message) -> None:
        """Forget everything, and begin with this answer of the replay in flight."""
        self.output.forget()
        self.reset(message.batch.ts)
        self.asking = True
        self._start_at(message, Reason.LATE)

    def _ahead(self, message: Message) -> None:
        assert self.next is not None
        self._held.add(message)
        if not self.gap:
            self.output.count("gaps", self.next, message.sequence - 1)
            self._opened()
            self._pursue()

    def _pursue(self) -> None:
        """Get what is missing, by a replay or by waiting for a moment."""
        if not self.asking and not self._ask():
            self._retry_at, self._give_up_at = None, self.clock() + REORDER_S

    def _lose(self, message: Message) -> None:
        """Go on at `message`: the messages before it are lost, and what was known is void."""
        assert self.next is not None
        self.output.count("lost", self.next, message.sequence - 1)
        self.output.forget()
        self._give_up_at, self._tries = None, 0
        self._start_at(message, Reason.LOST)

    def _give_up(self) -> None:
        """What is missing cannot be repeated: go on at the first kept message."""
        self._give_up_at = self._retry_at = None
        if self.next is not None and not self.gap:
            return
        if self._held:
            message = self._held.first()
            if self.next is None:
                self._start_at(message, Reason.LATE)
            else:
                self._lose(message)
        elif self.next is not None and self.next <= self._held.highest:
            self.output.forget()
            self.reset()  # there was no room to keep any: the next message is the first
        else:
            self._closed()

    def _again(self) -> None:
        """A replay has not closed the gap: request the rest, unless it brought nothing."""
        self._tries = 0 if self.next != self._progress else self._tries + 1
        if self._tries >= TRIES:
            self._tries = 0
            self._give_up()
        elif self.gap or self.next is None:
            self._pursue()

    def _ask(self, start: int | None = None) -> bool:
        """Request a replay from the last applied message on, or from `start`."""
        if start is None:
            start = 0 if self.next is None else max(self.next - 1, 0)
        if not self.output.ask(start):
            return False
        self._start, self._answers, self._progress = start, 0, self.next
        self._retry_at = self._give_up_at = None
        self._whole, self.asking = False, True
        return True


def _life(number: int) -> int:
    return number >> COUNT_BITS


def _is_first(number: int) -> bool:
    """Whether it is the first message of a publisher's life."""
    return number == _life(number) << COUNT_BITS


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
