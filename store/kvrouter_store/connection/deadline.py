"""How long an operation may take. Reads the monotonic clock and never waits."""

import time

from kvrouter_store.errors import DeadlineExceeded

MIN_RATE_BYTES_S = 64 << 20


class Deadline:
    """A point in time (`at`): `deadline_s` from now, and one second more per 64 MiB of payload."""

    __slots__ = ("at",)

    def __init__(self, deadline_s: float, payload_bytes: int = 0) -> None:
        self.at = time.monotonic() + deadline_s + payload_bytes / MIN_RATE_BYTES_S

    def left_s(self) -> float:
        """Seconds that remain. Raises DeadlineExceeded where none does."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the store did not answer within the deadline")
        return left
