"""Which chunk follows which in a prompt.

LMCache looks a prompt up chunk by chunk, in order, before it computes and stores what is missing.
The store then keeps a chunk for as long as it keeps those that follow it: without its beginning the
rest of a prompt is of no use.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

MAX_CHUNKS = 1 << 16


class ChunkOrder:
    """The predecessors of the chunks that were learnt last, by name. Safe in threads."""

    def __init__(self, most: int = MAX_CHUNKS) -> None:
        self._most = most
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, names: Sequence[bytes]) -> None:
        """These chunks follow one another."""
        with self._lock:
            for before, name in pairwise(names):
                self._before[name] = before
                self._before.move_to_end(name)
            while len(self._before) > self._most:
                self._before.popitem(last=False)

    def before(self, name: bytes) -> bytes | None:
        """The chunk before this one, where that is known."""
        with self._lock:
            return self._before.get(name)
