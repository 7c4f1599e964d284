"""The messages of one publisher, put in order: duplicates, gaps, restarts, replays.

A synchronous state machine: it takes messages and the time, and says through `StreamEnds` what is
to be applied, what is void, and from where a replay is wanted. It knows no socket and no event.

The publishers of vLLM and SGLang number messages from 0 and keep the last of them for replays, but
a number says nothing of who sent it: after a restart they begin anew. So a replay begins one
message before what is missing, and that one must be the one that was applied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.reorder import ReorderBuffer, fingerprint

if TYPE_CHECKING:
    from kvrouter.prefix.events.reorder import Budget, Message

REORDER_S: Final = 0.25
"""Where nobody replays: how long missing messages may still come by themselves."""
REMEMBERED: Final = 512
"""Messages whose fingerprints are kept, to tell a duplicate from another publisher's message."""
TRIES: Final = 3
"""Replays in a row that brought nothing, after which what is missing is given up."""
RETRY_S: Final = 1.0
"""Between two replays that were not answered; doubled each time."""
CERTAIN_ANSWERS: Final = 900
"""Of more answers than these the last but one may be dropped: ZMQ queues 1,000."""
CHECK_S: Final = 30.0
"""A publisher that says nothing for so long is asked whether it has."""


class StreamEnds(Protocol):
    """What a stream has done."""

    def apply(self, message: Message) -> None:
        """`message` is the next one."""

    def forget(self) -> None:
        """What was known from the messages before is void."""

    def ask(self, start: int) -> bool:
        """Have the messages from `start` on replayed, in place of any replay under way.

        Returns:
            whether there is anyone to ask: then `replayed`, `replay_ended` or `replay_failed` of
            the stream are called, never from within this call.
        """

    def count(self, kind: str, first: int, last: int) -> None:
        """`duplicates`, `gaps`, `restarts`, `lost` (first to last number) or `unanswered`."""

    def changed(self) -> None:
        """`Sequencer.reason` may be another one now."""


@dataclass(slots=True, eq=False)
class Sequencer:
    """One publisher.

    Attributes:
        ends: see `StreamEnds`.
        budget: shared with the other publishers.
        next: number of the message to be applied next; None while nothing is known.
        complete: whether all of its messages were applied, from 0 or an emptied cache on.
        missing: what is missing where it is not complete.
        gap: whether messages before those kept are missing.
        unverified: whether something may have come that nobody heard.
        asking: whether a replay is under way.
    """

    ends: StreamEnds
    budget: Budget
    next: int | None = None
    complete: bool = False
    missing: Reason = Reason.LATE
    gap: bool = False
    unverified: bool = False
    asking: bool = False
    _held: ReorderBuffer = field(init=False)
    _marks: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _last_ts: float = 0.0
    _now: float = 0.0
    _start: int = 0  # of the replay under way
    _answers: int = 0  # messages that it brought
    _progress: int | None = None  # `next` when it was asked for
    _tries: int = 0
    _short: bool = False  # whether a replay has shown that the first messages are no longer kept
    _whole: bool = False  # whether the replay under way is for what was before, and not needed
    _whole_at: float = 0.0
    _retry_at: float | None = None
    _give_up_at: float | None = None
    _seen: int | None = None  # `next` at the last look
    _quiet_since: float = 0.0

    def __post_init__(self) -> None:
        self._held = ReorderBuffer(self.budget)

    @property
    def reason(self) -> Reason:
        """How well this publisher is known."""
        if self.gap:
            return Reason.GAP
        if self.unverified:
            return Reason.CUT
        if self.next is None:
            return Reason.NO_EVENTS
        return Reason.COMPLETE if self.complete else self.missing

    def begin(self, now: float) -> None:
        """Find out what the publisher has said so far, where it can be asked."""
        self._now = now
        if self.next is None and not self.asking:
            self._ask()

    def receive(self, message: Message) -> None:
        """A message came; in whichever order, and however often."""
        if message.sequence == self.next:
            if self._held.any_before(message.batch.ts):
                self._restarted(message, replayed=False)
                return
            self._advance(message)
            if self.gap:
                self._release()
        elif self.next is None:
            self._first(message)
        elif message.sequence < self.next:
            self._old(message, replayed=False)
        else:
            self._ahead(message)

    def seen(self, sequence: int, payload: bytes) -> bool:
        """Whether exactly this message was applied lately."""
        if self.next is None or sequence >= self.next:
            return False
        place = len(self._marks) - (self.next - sequence)
        return place >= 0 and self._marks[place] == fingerprint(payload)

    def replayed(self, message: Message) -> None:
        """The publisher repeats a message, as it was asked to."""
        if not self.asking:
            return
        number, first = message.sequence, self._answers == 0
        self._answers += 1
        if first and self._start == 0:
            self._short = number > 0
        if first and number == 0 and self.next is not None and not self.complete:
            same = message.batch.ts <= self._last_ts
            known = max(self._held.highest, self.next - 1) if same else -1
            self._begin_anew(message)  # it has all that it ever said
            self._held.highest = max(self._held.highest, known)
            return
        if number == self.next and self._held.any_before(message.batch.ts):
            self._restarted(message, replayed=True)
        elif number == self.next:
            self.gap = True  # until all is repeated: a block told of here may be removed there
            self._advance(message)
            self._release()
        elif self.next is None:
            self._start_at(message, Reason.LATE)
        elif number < self.next:
            if not self.seen(number, message.payload):
                self._old(message, replayed=True)
        elif first:  # the publisher no longer has what is missing
            self._lose(message)
        else:
            self.gap = True  # an answer was dropped
            self._held.add(message)

    def replay_ended(self, now: float) -> None:
        """The publisher has repeated all that it has."""
        if not self.asking:
            return
        self._now = self._quiet_since = now
        self.asking = False
        if not self._answers and self._start and self._ask(0):
            return  # it has nothing so late: was it restarted, or does it keep nothing?
        if self._answers > CERTAIN_ANSWERS and self._ask():
            return
        if self._answers or not self.next:
            self.unverified = False
            self._whole_at = min(self._whole_at, now + CHECK_S)  # it answers again
        else:
            self._tries = TRIES  # it keeps nothing
        if self.next is None and self._held.highest < 0:
            self.next, self.complete = 0, True  # it has said nothing yet
        elif self.next is None or self.next <= self._held.highest:
            self._again()
        else:
            self._closed()
        self.ends.changed()

    def replay_failed(self, now: float) -> None:
        """The publisher did not answer, or not to the end."""
        if not self.asking:
            return
        self._now, self.asking = now, False
        if self.next != self._progress:
            self._tries = 0
            self._pursue()
        elif self._tries + 1 < TRIES:
            self._retry_at = now + RETRY_S * 2.0**self._tries
            self._tries += 1
        else:
            self._tries, self._quiet_since = 0, now
            self.ends.count("unanswered", self._start, self._start)
            if self.next is not None and not (self.gap or self._whole):
                self.unverified, self._seen = True, self.next
            self._give_up()
            self._whole_at = now + 10 * CHECK_S
        self.ends.changed()

    def cut(self) -> None:
        """The connection on which its messages come is broken: some may be lost."""
        if self.next is not None:
            self.unverified, self._seen = True, self.next
            self.ends.changed()

    def check(self, now: float) -> bool:
        """Find out whether anything was lost; returns whether there is anyone to ask."""
        self._now = now
        return self.asking or self._retry_at is not None or self._ask()

    def reset(self, since_ts: float = inf) -> None:
        """Nothing is known of the publisher but what it sent from `since_ts` on, by its clock."""
        self._held.discard(lambda held: held.batch.ts < since_ts)
        self._marks.clear()
        self.next = self._give_up_at = self._retry_at = self._seen = None
        self.complete = self.gap = self.unverified = self.asking = False
        self.missing, self._last_ts, self._tries = Reason.LATE, 0.0, 0
        self._short, self._whole_at = False, self._now + CHECK_S

    def relearn(self, now: float) -> None:
        """What was known is void though nothing was lost: have it repeated from the start."""
        self._now = now
        self.complete, self.missing = False, Reason.LATE
        self._ask(0)
        self.ends.changed()

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._now = now
        if self.next != self._seen:
            self._seen, self._quiet_since = self.next, now
            if self.unverified and not self.asking:
                self.unverified = False  # it went on where it was cut: nothing is missing
                self.ends.changed()
        if self._give_up_at is not None:
            if now >= self._give_up_at:
                self._give_up()
                self.ends.changed()
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
        self.ends.apply(message)

    def _release(self) -> None:
        """Apply what was kept, as far as nothing is missing."""
        assert self.next is not None
        kept = self._held.take(self.next - 1)
        if kept is not None and fingerprint(kept.payload) != self._marks[-1]:
            self._old(kept, replayed=False)  # it was replayed by one who is gone
            return
        while (message := self._held.take(self.next)) is not None:
            self._advance(message)
        if self.next > self._held.highest and not self.asking:
            self._closed()
            self.ends.changed()

    def _closed(self) -> None:
        """Nothing is missing between the messages that are known of."""
        self.gap, self._give_up_at, self._retry_at, self._tries = False, None, None, 0

    def _first(self, message: Message) -> None:
        if message.sequence == 0:
            self._start_at(message, Reason.LATE)
            return
        self._held.add(message)
        if not self.asking and self._retry_at is None and not self._ask():
            self._start_at(message, Reason.LATE)

    def _start_at(self, message: Message, missing: Reason) -> None:
        """Whatever came before `message` is not known."""
        self.complete, self.missing = message.sequence == 0, missing
        self._marks.clear()
        number, ts = message.sequence, message.batch.ts  # (the clock tells who was there before)
        self._held.discard(lambda held: held.sequence < number or held.batch.ts < ts)
        self._advance(message)
        self.gap = True
        self._release()
        if self.gap and self._retry_at is None:
            self._pursue()
        self.ends.changed()

    def _old(self, message: Message, *, replayed: bool) -> None:
        """A number that was had: the same message again, or one of a publisher that began anew."""
        assert self.next is not None
        number = message.sequence
        place = len(self._marks) - (self.next - number)
        if place >= 0:
            same = self._marks[place] == fingerprint(message.payload)
        else:  # so late that only the publisher's clock can tell
            same = message.batch.ts <= self._last_ts
        if same:
            self.ends.count("duplicates", number, number)
            return
        self._restarted(message, replayed=replayed)

    def _restarted(self, message: Message, *, replayed: bool) -> None:
        """`message` is of a publisher that began again at 0.

        Its number may be the one that is missing from the publisher before it. The clock tells
        them apart: what is held has higher numbers, and a publisher sends these later.
        """
        assert self.next is not None
        self.ends.count("restarts", message.sequence, self.next)
        if replayed and self._start == 0:
            self._begin_anew(message)
        else:
            self.ends.forget()
            self.reset(message.batch.ts)
            self.receive(message)
            self.ends.changed()

    def _begin_anew(self, message: Message) -> None:
        """Go on with the answers to a replay, of which this is the first that counts."""
        self.ends.forget()
        self.reset(message.batch.ts)
        self.asking = True
        self._start_at(message, Reason.LATE)

    def _ahead(self, message: Message) -> None:
        assert self.next is not None
        self._held.add(message)
        if not self.gap:
            self.gap = True
            self.ends.count("gaps", self.next, message.sequence - 1)
            self._pursue()
            self.ends.changed()

    def _pursue(self) -> None:
        """Get what is missing: from the publisher, or by waiting a moment."""
        if not self.asking and not self._ask():
            self._retry_at, self._give_up_at = None, self._now + REORDER_S

    def _lose(self, message: Message) -> None:
        """Go on at `message`: what is between is gone for good, and with it what was known."""
        assert self.next is not None
        self.ends.count("lost", self.next, message.sequence - 1)
        self.ends.forget()
        self._give_up_at, self._tries = None, 0
        self._start_at(message, Reason.LOST)

    def _give_up(self) -> None:
        """Nobody can say what is missing: go on at the first message that is there."""
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
            self.ends.forget()
            self.reset()  # there was no room to keep any: the next one to come is the first
        else:
            self._closed()

    def _again(self) -> None:
        """A replay has not closed the gap: ask for the rest, unless it brings nothing."""
        self._tries = 0 if self.next != self._progress else self._tries + 1
        if self._tries >= TRIES:
            self._tries = 0
            self._give_up()
        elif self.gap or self.next is None:
            self._pursue()

    def _ask(self, start: int | None = None) -> bool:
        """Have everything replayed from the last applied message on, or from `start`."""
        if start is None:
            start = 0 if self.next is None else max(self.next - 1, 0)
        if not self.ends.ask(start):
            return False
        self._asked(start)
        return True

    def _asked(self, start: int) -> None:
        self._start, self._answers, self._progress = start, 0, self.next
        self._whole = False
        self._retry_at = self._give_up_at = None
        self.asking = True
