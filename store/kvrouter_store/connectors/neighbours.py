"""Other nodes of the store, from which an engine reads what its own node lacks.

A router names one in a request. Anyone who reaches the engine can send it a request, so the engine
connects only to nodes that its settings allow.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from kvrouter_store.connection.address import Address, parse_url
from kvrouter_store.errors import StoreUnavailable

MOST_CLIENTS: Final = 16
IDLE_S: Final = 60.0
ANY: Final = "any"
C = TypeVar("C")


@dataclass(frozen=True)
class Sources:
    """Which nodes a request may name.

    own: the addresses of the engine's own node. others: further nodes; None allows any, but none
    without TLS where the own node has it.
    """

    own: frozenset[Address]
    others: frozenset[Address] | None

    @classmethod
    def of(cls, neighbours: str, *own: str) -> Self:
        """By a setting: 'any', or HOST:PORT or URLs with commas between. ValueError otherwise.

        own: URLs of the engine's own node; HOST:PORT has TLS if one of them has it.
        """
        here = frozenset(parse_url(each) for each in own if each)
        if neighbours == ANY:
            return cls(here, None)
        scheme = "kvs" if any(each.tls for each in here) else "kv"
        named = [each.strip() for each in neighbours.split(",") if each.strip()]
        urls = [each if "://" in each else f"{scheme}://{each}" for each in named]
        return cls(here, frozenset(map(parse_url, urls)))

    def url(self, source: str) -> str | None:
        """The URL of the node that a request names: '' for the own one, None if not allowed.

        Hints of other routers name it as tcp://HOST:PORT: with TLS if the own one has it.
        """
        scheme = "kvs" if any(each.tls for each in self.own) else "kv"
        try:
            address = parse_url(re.sub(r"\Atcp(?=://)", scheme, source))
        except ValueError:
            return None
        if address in self.own:
            return ""
        if self.others is None:
            bare = any(each.tls for each in self.own) and not address.tls
            return None if bare or address.path else str(address)
        return str(address) if address in self.others else None


def name_of(url: str, advertise: str = "") -> str:
    """The URL of an engine's own node for others; '' where there is none."""
    return advertise or ("" if parse_url(url).path else url)


@dataclass
class _Used(Generic[C]):
    client: C
    users: int = 0
    at: float = 0.0  # when it was given back


class Neighbours(Generic[C]):
    """One client for each node that was used lately: at most MOST_CLIENTS. Safe in threads.

    Owns the clients, and ends each by `end`, which must not raise.
    """

    def __init__(
        self,
        make: Callable[[str], C],
        end: Callable[[C], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._end = end
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[str, _Used[C]] = {}  # what was used last is the last

    @contextmanager
    def client(self, node: str) -> Iterator[C]:
        """The client of a node; ends those that nobody used for IDLE_S, or to make room.

        Raises StoreUnavailable where there is no room, and what `make` raises.
        """
        with self._lock:
            used, idle = self._take(node)
        try:
            for each in idle:
                self._end(each)
            yield used.client
        finally:
            with self._lock:
                used.users -= 1
                used.at = self._clock()

    def close(self) -> None:
        """End all clients."""
        with self._lock:
            used, self._used = self._used, {}
        for each in used.values():
            self._end(each.client)

    def _take(self, node: str) -> tuple[_Used[C], list[C]]:
        now, known = self._clock(), self._used.get(node)
        idle = [each for each, used in self._used.items() if not used.users and each != node]
        crowd = len(self._used) + (known is None) - MOST_CLIENTS
        if crowd > len(idle):
            raise StoreUnavailable(f"{MOST_CLIENTS} other nodes are in use")
        known = known or _Used(self._make(node))
        known.users += 1
        self._used.pop(node, None)
        self._used[node] = known
        gone = [
            each for at, each in enumerate(idle) if at < crowd or now - self._used[each].at > IDLE_S
        ]
        return known, [self._used.pop(each).client for each in gone]
