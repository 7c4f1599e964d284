"""What an adapter has done so far, for LMCache's status page."""

import threading
from collections import Counter
from typing import Literal, get_args

Count = Literal[
    "objects_stored",
    "objects_not_stored",
    "objects_looked_up",
    "objects_found",
    "objects_loaded",
    "objects_not_loaded",
    "objects_corrupt",
    "tasks_refused",
    "tasks_failed",
]


class Counts:
    """Counters by name. Safe in threads."""

    def __init__(self) -> None:
        self._counts: Counter[Count] = Counter(dict.fromkeys(get_args(Count), 0))
        self._lock = threading.Lock()

    def add(self, name: Count, count: int = 1) -> None:
        """Count more of them."""
        with self._lock:
            self._counts[name] += count

    def as_dict(self) -> dict[str, int]:
        """All counters."""
        with self._lock:
            return {str(name): count for name, count in self._counts.items()}
