"""What LMCache has found and not unlocked yet, and the leases that keep it in the store.

A lookup locks the objects that it finds, a lease for each run of them; LMCache unlocks them one by
one, in any order, and forgets to where it gives a request up. A lease ends when all its objects are
unlocked, at the latest after a time. Decides only: the caller releases.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")  # hashable
L = TypeVar("L")


@dataclass(eq=False)
class _Held(Generic[K, L]):
    lease: L
    keys: Counter[K]  # those that are still locked
    since: float


class Locks(Generic[K, L]):
    """Leases by the keys of their objects. Safe in threads.

    most_s: how long a lease is kept for keys that nobody unlocks.

    Attributes:
        expired: how many keys were still locked when their time was up.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.expired = 0
        self._most_s = most_s
        self._clock = clock
        self._held: dict[int, _Held[K, L]] = {}  # the oldest first
        self._by_key: defaultdict[K, deque[_Held[K, L]]] = defaultdict(deque)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._by_key

    def add(self, lease: L, keys: Iterable[K]) -> None:
        """The objects of these keys are kept by this lease."""
        held = _Held(lease, Counter(keys), self._clock())
        with self._lock:
            self._held[id(held)] = held
            for key in held.keys.elements():
                self._by_key[key].append(held)

    def unlock(self, keys: Iterable[K]) -> list[L]:
        """Unlock each key once; the leases that are to be released. Unknown keys are left out."""
        over = []
        with self._lock:
            for key in keys:
                if key not in self._by_key:
                    continue
                held = self._by_key[key].popleft()
                held.keys[key] -= 1
                self._forget_empty(key)
                if not held.keys.total():
                    del self._held[id(held)]
                    over.append(held.lease)
        return over

    def take_expired(self) -> list[L]:
        """The leases whose time is up, which are to be released."""
        with self._lock:
            until = self._clock() - self._most_s
            old = [held for held in self._held.values() if held.since <= until]
            for held in old:
                self._drop(held)
                self.expired += held.keys.total()
        return [held.lease for held in old]

    def _drop(self, held: _Held[K, L]) -> None:
        del self._held[id(held)]
        for key in held.keys.elements():
            self._by_key[key].remove(held)
            self._forget_empty(key)

    def _forget_empty(self, key: K) -> None:
        if not self._by_key[key]:
            del self._by_key[key]
