"""Which requests may fail in the drill. Knows the schedule of faults, not the router."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

HUNG_S = 30.0
"""A request that takes longer hangs: more than every deadline of the drill's router together."""


class End(StrEnum):
    """How a request ended for its client."""

    WHOLE = "whole"
    REFUSED = "refused"  # a status other than 200
    ERROR_EVENT = "error event"  # a stream that had begun ended with one
    CUT = "cut"  # the connection ended before the answer
    HUNG = "hung"


@dataclass
class Asked:
    """One request. Times are seconds since the drill began; for `idle_s` its client did not read.

    Attributes:
        resumable: whether its stream could go on at another engine.
    """

    name: str
    stream: bool
    begun_s: float
    expected: str = ""
    first_s: float | None = None
    ended_s: float = 0.0
    idle_s: float = 0.0
    resumable: bool = True
    end: End = End.HUNG
    text: str = ""
    said: str = ""

    @property
    def failed(self) -> bool:
        """Whether the client did not get its whole answer."""
        return self.end is not End.WHOLE

    @property
    def hung(self) -> bool:
        """Whether it took longer than any fault explains."""
        return self.end is End.HUNG or self.ended_s - self.begun_s - self.idle_s > HUNG_S

    @property
    def wrong(self) -> bool:
        """Whether its text differs from the right one; a broken stream may be short."""
        if self.end is End.WHOLE:
            return self.text != self.expected
        return not self.expected.startswith(self.text)


@dataclass
class Fault:
    """One fault: what happened to which process, and from when to when.

    Attributes:
        breaks_streams: whether streams of its engines cannot go on where they are.
        down: names of the engines that could not be reached meanwhile, with their role.
    """

    name: str
    at_s: float
    until_s: float = float("inf")
    breaks_streams: bool = False
    down: dict[str, str] = field(default_factory=dict)

    def touches(self, begun_s: float, ended_s: float) -> bool:
        """Whether it lasted at any time between two times."""
        return self.at_s <= ended_s and begun_s <= self.until_s


class Schedule:
    """The faults of the drill, and its engines.

    Args:
        roles: role of every engine by its name.
    """

    def __init__(self, roles: dict[str, str]) -> None:
        self._roles = roles
        self.faults: list[Fault] = []

    def may_fail(self, asked: Asked) -> bool:
        """Whether no engine of a role ran at some time of the request, or its stream broke and
        no other engine can continue one of its kind; that must end with an error event.
        """
        touching = [f for f in self.faults if f.touches(asked.begun_s, asked.ended_s)]
        if any(self._alone(touching, role) for role in set(self._roles.values())):
            return True
        if asked.resumable or asked.first_s is None or asked.end is not End.ERROR_EVENT:
            return False
        return any(
            f.breaks_streams and f.touches(asked.first_s, asked.ended_s) for f in self.faults
        )

    def _alone(self, faults: Sequence[Fault], role: str) -> bool:
        """Whether every engine of `role` was down at one time of these faults."""
        engines = {name for name, of in self._roles.items() if of == role}
        for moment in [f.at_s for f in faults]:
            here = [f for f in faults if f.touches(moment, moment)]
            away = {name for f in here for name, of in f.down.items() if of == role}
            if engines <= away:
                return True
        return False


@dataclass
class Leak:
    """A gauge that should have returned to its first value."""

    name: str
    before: float
    after: float

    @property
    def leaked(self) -> bool:
        """Whether the value is higher than at first."""
        return self.after > self.before


@dataclass
class Verdict:
    """The counts of a drill."""

    requests: int
    failed: int
    excused: int
    hung: int
    wrong: int
    problems: list[str]

    @property
    def well(self) -> bool:
        """Whether the bars hold."""
        return not self.problems


def judge(schedule: Schedule, asked: Iterable[Asked], leaks: Iterable[Leak]) -> Verdict:
    """Judge every request by the schedule."""
    every = list(asked)
    failed = [one for one in every if one.failed]
    excused = [one for one in failed if schedule.may_fail(one)]
    hung = [one for one in every if one.hung]
    wrong = [one for one in every if one.wrong]
    problems = [
        f"{o.name} failed without excuse: {described(o)}" for o in failed if o not in excused
    ]
    problems += [f"{one.name} hung: {described(one)}" for one in hung]
    problems += [f"{one.name} got wrong tokens: {described(one)}" for one in wrong]
    problems += [f"{k.name}: {k.before:g} before, {k.after:g} after" for k in leaks if k.leaked]
    if not every:
        problems.append("no request was made")
    return Verdict(len(every), len(failed), len(excused), len(hung), len(wrong), problems)


def described(one: Asked) -> str:
    """A request in one line."""
    first = f"{one.first_s:.2f}" if one.first_s is not None else "-"
    kind = "stream" if one.stream else "whole"
    times = f"from {one.begun_s:.2f}, first byte {first}, to {one.ended_s:.2f} s"
    return f"{kind}, {times}: {one.end}; {one.said[:200]}"


def table(schedule: Schedule, asked: Iterable[Asked]) -> list[str]:
    """Requests in flight during each fault; a failed one counts at the last fault before it."""
    every, faults = list(asked), sorted(schedule.faults, key=lambda f: f.at_s)
    lines = [f"{'fault':<34} {'from':>6} {'to':>6} {'requests':>9} {'failed':>7} {'excused':>8}"]
    ends = [fault.at_s for fault in faults[1:]] + [float("inf")]
    for fault, end_s in zip(faults, ends, strict=True):
        under = [one for one in every if fault.touches(one.begun_s, one.ended_s)]
        failed = [one for one in every if one.failed and fault.at_s <= one.ended_s < end_s]
        excused = [one for one in failed if schedule.may_fail(one)]
        times = f"{fault.at_s:>6.1f} {fault.until_s:>6.1f}"
        counts = f"{len(under):>9} {len(failed):>7} {len(excused):>8}"
        lines.append(f"{fault.name:<34} {times} {counts}")
    return lines
