"""When to try a server again that could not be reached. Pure: takes the clock's readings."""

from dataclasses import dataclass

__all__ = ["BackOff"]


@dataclass
class BackOff:
    """Doubles the pause after each failure, from `first_s` up to `longest_s`."""

    first_s: float = 0.05
    longest_s: float = 1.0
    failures: int = 0
    retry_at: float = 0.0

    def failed(self, now: float) -> None:
        """A try failed at `now`."""
        pause_s = min(self.longest_s, self.first_s * 2 ** min(self.failures, 16))
        self.failures += 1
        self.retry_at = now + pause_s

    def succeeded(self) -> None:
        """A try succeeded: the next failure starts from the beginning."""
        self.failures = 0
        self.retry_at = 0.0

    def remaining_s(self, now: float) -> float:
        """Seconds until the next try is due; 0 where it is."""
        return max(0.0, self.retry_at - now)
