"""When a client tries a node again that it could not reach, or that did not answer in time.

Every pause of a client's connection is here. Nothing waits: the methods take readings of a clock.
"""

from dataclasses import dataclass, field

FIRST_PAUSE_S = 0.05
"""After the first attempt to connect that failed; each further one doubles it."""
FIRST_PROBE_PAUSE_S = 0.25
"""After the first request that a connected node did not answer in time."""
LONGEST_PAUSE_S = 1.0


@dataclass
class BackOff:
    """Doubles the pause after each failure, from `first_s` up to `longest_s`."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    failures: int = 0
    retry_at: float = 0.0

    def failed(self, now: float) -> None:
        """An attempt failed at `now`."""
        pause_s = min(self.longest_s, self.first_s * 2 ** min(self.failures, 16))
        self.failures += 1
        self.retry_at = now + pause_s

    def succeeded(self) -> None:
        """An attempt succeeded: the next failure starts with the first pause."""
        self.failures = 0
        self.retry_at = 0.0

    def remaining_s(self, now: float) -> float:
        """Seconds until the next attempt is due; 0 where it is."""
        return max(0.0, self.retry_at - now)


@dataclass
class Circuit:
    """A circuit breaker: open from the first time-out until the node answers a probe.

    While it is open, one operation at a time probes the node, with pauses in between. The caller
    holds a lock.
    """

    is_open: bool = False
    _probing: bool = False
    _pause: BackOff = field(default_factory=lambda: BackOff(FIRST_PROBE_PAUSE_S))

    def may_probe(self, now: float) -> bool:
        """Whether an operation that finds it open at `now` probes the node, and reports that."""
        if self._probing or self.remaining_s(now):
            return False
        self._probing = True
        return True

    def timed_out(self, now: float) -> None:
        """An operation got no answer in time. Changes nothing while the circuit is open."""
        if not self.is_open:
            self.is_open = True
            self._pause.failed(now)

    def probed(self, now: float, *, answered: bool) -> None:
        """The probe ended: the circuit closes, or the next pause begins."""
        self._probing = False
        self.is_open = not answered
        if answered:
            self._pause.succeeded()
        else:
            self._pause.failed(now)

    def remaining_s(self, now: float) -> float:
        """Seconds until the next probe is due; 0 where it is."""
        return self._pause.remaining_s(now)
