"""Whether operations may ask a node that did not answer in time. Pure: takes clock readings."""

from dataclasses import dataclass, field
from enum import Enum

from kvrouter_store.connection.backoff import BackOff

__all__ = ["Circuit", "CircuitPass"]


class CircuitPass(Enum):
    """What an operation may do."""

    PASS = "pass"  # ask the node
    PROBE = "probe"  # first find out whether the node answers, and tell the circuit
    REFUSE = "refuse"  # fail at once


@dataclass
class Circuit:
    """A circuit breaker: open from the first time-out on, until one probe was answered.

    While it is open, one operation at a time probes the node, with pauses between probes.
    The caller holds a lock.
    """

    is_open: bool = False
    _probing: bool = False
    _pause: BackOff = field(default_factory=lambda: BackOff(first_s=0.25, longest_s=1.0))

    def admit(self, now: float) -> CircuitPass:
        """What an operation that begins at `now` may do."""
        if not self.is_open:
            return CircuitPass.PASS
        if self._probing or self.remaining_s(now):
            return CircuitPass.REFUSE
        self._probing = True
        return CircuitPass.PROBE

    def timed_out(self, now: float) -> None:
        """An operation got no answer in time. Says nothing new while the circuit is open."""
        if not self.is_open:
            self.is_open = True
            self._pause.failed(now)

    def probed(self, now: float, *, answered: bool) -> None:
        """The probe has ended: the circuit closes, or the next pause begins."""
        self._probing = False
        self.is_open = not answered
        if answered:
            self._pause.succeeded()
        else:
            self._pause.failed(now)

    def remaining_s(self, now: float) -> float:
        """Seconds until the next probe is due; 0 where it is."""
        return self._pause.remaining_s(now)
