"""A client of the store for an engine that goes on while the store is away.

No operation raises for an absent store. Only the first operation of an outage may wait for its
deadline. From then on the engine continues at once without the store, while a thread looks for it.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import KVStoreError, StoreClosed, StoreRefused, Unauthorized

HEARTBEAT_S = 1.0
AWAY_S = 0.1  # between heartbeats to a store that is away; connection.reconnect paces connections

T = TypeVar("T")


class Reach:
    """Whether a client reaches its store. Safe in threads. Owns the client and a thread.

    before_beat: called in that thread before each sign of life. What it raises counts as an answer
    that did not come.

    Attributes:
        latest: the store's gauges and counters at the last sign of life; empty before the first.
    """

    def __init__(
        self,
        client: StoreClient,
        log: logging.Logger,
        before_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.log = log
        self.latest: dict[str, int] = {}
        self._before_beat = before_beat
        self._away = threading.Event()
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True)

    @property
    def away(self) -> bool:
        """Whether the store is known to be away."""
        return self._away.is_set()

    @property
    def pause_s(self) -> float:
        """Seconds between two heartbeats: a store that is away is asked more often."""
        return AWAY_S if self.away else HEARTBEAT_S

    def start(self) -> None:
        """Look for the store from now on, in a thread. Without it, a store once lost stays away."""
        self._thread.start()

    def beat(self) -> bool:
        """Ask the store for a sign of life; whether it came."""
        try:
            self._before_beat()
            self.latest = self.client.stats()
        except Exception as error:  # whatever it is: else nobody would look for the store any more
            self._lost(error)
            return False
        if self._away.is_set():
            self._away.clear()
            self.log.warning("the store is back")
        return True

    def operate(self, operation: Callable[[], T], without: T) -> T:
        """The operation's result, or `without` where the store is away or refuses."""
        if self._away.is_set():
            return without
        try:
            return operation()
        except Unauthorized as error:  # of no use until the store or this client has another token
            self._lost(error)
            return without
        except StoreRefused as error:
            self.log.warning("the store refused: %s", error)
            return without
        except KVStoreError as error:
            self._lost(error)
            return without

    def close(self, deadline_s: float = 5.0) -> None:
        """Close the client and end the thread; every later operation finds the store away."""
        self._closed.set()
        self.client.close()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _lost(self, error: Exception) -> None:
        with self._turn:
            known = self._away.is_set() or isinstance(error, StoreClosed)
            self._away.set()
        if not known:
            trace = not isinstance(error, KVStoreError)
            self.log.warning("the store is away, going on without it: %s", error, exc_info=trace)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.beat()
            self._closed.wait(self.pause_s)
