"""What LMCache was told of the objects that this server stored. Imports no LMCache.

The store evicts objects, loses them when it restarts, and drops corrupt ones. LMCache's coordinator
takes an object as stored until it is told of its deletion, and routers ask the coordinator.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice

from kvrouter_store.connectors.lmcache.names import ObjectKey
from kvrouter_store.identity.block import Manifest

MAX_OBJECTS = 1 << 18  # of some 310 bytes each, mostly LMCache's keys

Tell = Callable[[list[ObjectKey], list[int]], None]
"""Tells LMCache of objects, by their keys and sizes in bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Told:
    """What LMCache was told last of an object; another one each time that it is told."""

    manifest: Manifest
    there: bool

    @property
    def counted_bytes(self) -> int:
        """What it adds to the usage of its salt."""
        return self.manifest.block_bytes if self.there else 0


class Announced:
    """The objects that this server stored, those that were checked last. Safe in threads.

    stored, deleted: called in the order of what happened, for one change at a time: a deletion
    that is told after the next store would hide the object. They may call back.
    """

    def __init__(self, stored: Tell, deleted: Tell, most: int = MAX_OBJECTS) -> None:
        self._stored, self._deleted = stored, deleted
        self._most = most
        self._told: OrderedDict[ObjectKey, Told] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._order = threading.RLock()  # held while LMCache is told; nothing waits for the store

    def bytes_by_salt(self) -> dict[str, int]:
        """What is there, each object once."""
        with self._lock:
            return dict(self._bytes)

    def of(self, keys: Iterable[ObjectKey]) -> list[Told | None]:
        """What was told of each of these."""
        with self._lock:
            return list(map(self._told.get, keys))

    def next(self, most: int) -> dict[ObjectKey, Told]:
        """The objects whose turn it is to be checked."""
        with self._lock:
            turn = dict(islice(self._told.items(), most))
            for key in turn:
                self._told.move_to_end(key)
            return turn

    def stored(self, keys: Sequence[ObjectKey], manifests: Sequence[Manifest]) -> None:
        """This server stored them. LMCache is told so each time: others may have told of an end."""
        if not keys:
            return
        with self._order:
            with self._lock:
                for key, manifest in zip(keys, manifests, strict=True):
                    self._note(key, Told(manifest, True))
                while len(self._told) > self._most:
                    self._note(next(iter(self._told)), None)
            self._stored(list(keys), [manifest.block_bytes for manifest in manifests])

    def checked(self, seen: Mapping[ObjectKey, Told], there: Sequence[bool]) -> None:
        """The store has those of `seen` that are `there`; LMCache is told of new and evicted ones.

        Not of objects that were told of since they were `seen`: the store may have answered before.
        """
        with self._order:
            for now, tell in ((True, self._stored), (False, self._deleted)):
                sizes = {}
                with self._lock:
                    for key in compress(seen, (here is now for here in there)):
                        if self._told.get(key) is seen[key] and seen[key].there is not now:
                            sizes[key] = seen[key].manifest.block_bytes
                            self._note(key, Told(seen[key].manifest, now))
                if sizes:
                    tell(list(sizes), list(sizes.values()))

    def deleted(self, seen: Mapping[ObjectKey, Told | None]) -> None:
        """They were deleted after they were `seen`, whoever had stored them."""
        with self._order:
            sizes = {}
            with self._lock:
                for key, told in seen.items():
                    if self._told.get(key) is told:
                        sizes[key] = told.counted_bytes if told else 0
                        self._note(key, None)
            if sizes:
                self._deleted(list(sizes), list(sizes.values()))

    def _note(self, key: ObjectKey, told: Told | None) -> None:
        old = self._told.pop(key, None)
        if told is not None:
            self._told[key] = told
        more = (told.counted_bytes if told else 0) - (old.counted_bytes if old else 0)
        self._bytes[key.cache_salt] += more
        if not self._bytes[key.cache_salt]:
            del self._bytes[key.cache_salt]
