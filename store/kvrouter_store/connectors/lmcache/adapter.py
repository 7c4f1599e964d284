"""The store as an L2 adapter of LMCache's multiprocess server: class KVStoreL2.

    lmcache server --l2-adapter '{"type": "plugin", "shared": true, "class_name": "KVStoreL2",
      "module_path": "kvrouter_store.connectors.lmcache",
      "adapter_params": {"url": "kv://127.0.0.1:7400"}}'

LMCache's controllers call it from two threads and never wait in a call (the contract is in
lmcache/v1/distributed/l2_adapters/base.py). Objects go straight between LMCache's memory and the
store, in threads of the adapter.
"""

import itertools
import os
import platform
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.lease import Lease
from kvrouter_store.client.results import THERE
from kvrouter_store.connectors.lmcache.announced import Announced, Told
from kvrouter_store.connectors.lmcache.blobs import Blob, Blobs
from kvrouter_store.connectors.lmcache.locks import Locks
from kvrouter_store.connectors.lmcache.memory import ObjectMemory
from kvrouter_store.connectors.lmcache.names import Manifests, ObjectKey, layout_of, name_of
from kvrouter_store.connectors.lmcache.settings import L2Settings
from kvrouter_store.connectors.lmcache.tasks import Results, Workers
from kvrouter_store.connectors.reach import Reach
from kvrouter_store.errors import KVStoreError

log = init_logger(__name__)
R = TypeVar("R")
NOTHING_STORED = L2StoreResult(False, 0)
CHECKED_AT_ONCE = 1024  # objects, with each sign of life of the store


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


class KVStoreL2(L2AdapterInterface):  # type: ignore[misc]
    """Keeps LMCache's objects in a store node. Without a reachable store LMCache goes on with L1.

    params: what `L2Settings` says. l1_memory_desc: LMCache's L1MemoryDesc of its own memory.
    Raises ConnectorRefused where the settings cannot be used. Owns threads, connections and
    eventfds: close() ends them.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None, **_: Any) -> None:
        super().__init__()
        settings = L2Settings.of(params)
        engine = settings.name or f"lmcache/{platform.node()}/{os.getpid()}"
        memory = l1_memory_desc and ObjectMemory(l1_memory_desc.ptr, l1_memory_desc.size)
        self._url = settings.url
        self._reach = Reach(settings.client(engine), log, self._before_beat)
        self._blobs = Blobs(self._reach, memory or ObjectMemory(), engine)
        self._manifests = Manifests(settings.weights_revision)
        self._announced = Announced(self._notify_keys_stored, self._notify_keys_deleted)
        self._locks: Locks[ObjectKey, Lease] = Locks(settings.lock_s)
        self._over: deque[Lease] = deque()  # to be released
        self._counts = Counts()
        self._tasks = itertools.count(1)
        self._stored: Results[L2StoreResult] = Results()
        self._found: Results[Bitmap] = Results()
        self._loaded: Results[Bitmap] = Results()
        # A lookup waits for no transfer.
        self._storing, self._finding, self._loading = (
            Workers(settings.threads, f"kvstore-lmcache-{kind}")
            for kind in ("store", "find", "load")
        )
        self._reach.start()

    def get_store_event_fd(self) -> int:
        """The eventfd that tells of results of stores."""
        return self._stored.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """The eventfd that tells of results of lookups."""
        return self._found.fd

    def get_load_event_fd(self) -> int:
        """The eventfd that tells of results of loads."""
        return self._loaded.fd

    def submit_store_task(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Store objects; the task's number."""
        return self._submit(
            self._storing, self._stored, NOTHING_STORED, lambda: self._store(keys, objects)
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The results of stores since the last call, by task: failed where an object is missing."""
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Find objects, and lock those in the store's memory; the task's number.

        group_layout_descs: LMCache's MemoryLayoutDesc of each object group.
        """
        return self._submit(
            self._finding,
            self._found,
            Bitmap(len(keys)),
            lambda: self._find(keys, group_layout_descs),
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which objects were found, once; None while the task runs."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Unlock objects, which the store may evict then. Locks that are left over end in time."""
        self._over.extend(self._locks.unlock(keys))
        if self._over:
            self._finding.submit(self._release)  # else the next sign of life does it

    def submit_load_task(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> int:
        """Load objects into the memory of these; the task's number."""
        return self._submit(
            self._loading, self._loaded, Bitmap(len(keys)), lambda: self._load(keys, objects)
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which objects came as they were stored, once; None while the task runs."""
        return self._loaded.take(task_id)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Forget objects, also those of other servers, unless this one has them locked.

        One line in the log tells where the store is away. It would end LMCache's thread to raise.
        """
        free = [key for key in keys if key not in self._locks]
        seen = dict(zip(free, self._announced.of(free), strict=True))
        if any(not self._manifests.all_of(key) for key in free):
            listed = self._reach.operate(self._reach.client.manifests, None) or []
            self._manifests.learn(each.manifest for each in listed)
        wanted = [
            (key, Blob(manifest, name_of(key)))
            for key in free
            for manifest in self._manifests.all_of(key)
        ]
        if not self._blobs.delete([blob for _, blob in wanted]):
            log.warning("the store is away: %d objects are not deleted", len(free))
            return
        # Also those that were gone or that another server had stored: LMCache has asked for it.
        self._announced.deleted({key: seen[key] for key, _ in wanted})

    def get_usage(self) -> AdapterUsage:
        """The store's own memory, by its last sign of life; by salt what this server has stored."""
        latest = self._reach.latest
        return AdapterUsage(
            total_bytes_used=latest.get("used_bytes", 0),
            total_capacity_bytes=latest.get("pool_bytes", 0),
            bytes_by_cache_salt=self._announced.bytes_by_salt(),
        )

    def report_status(self) -> dict[str, Any]:
        """What LMCache's /status shows. LMCache is healthy without the store: it goes on."""
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "url": self._url,
            "store": "away" if self._reach.away else "there" if self._reach.latest else "not seen",
            "transport": self._reach.client.transport,
            "leases": len(self._locks),
            "locks_expired": self._locks.expired,
            **self._counts.as_dict(),
        }

    def close(self) -> None:
        """End threads, connections and locks; what runs ends first. Idempotent."""
        for workers in (self._storing, self._finding, self._loading):
            workers.close()
        self._reach.close()
        for results in (self._stored, self._found, self._loaded):
            results.close()

    def _submit(
        self, workers: Workers, results: Results[R], failed: R, work: Callable[[], R]
    ) -> int:
        """Have it done in a thread; `failed` is the result where that is not possible."""
        task = next(self._tasks)

        def run() -> None:
            result = failed
            try:
                result = work()
            except Exception:
                self._counts.add("tasks_failed")
                log.exception("a task failed")
            results.put(task, result)

        if not workers.submit(run):
            self._counts.add("tasks_refused")
            results.put(task, failed)
        return task

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> L2StoreResult:
        blobs = self._placed(keys, objects)
        statuses = self._blobs.put(blobs)
        new = [place for place, status in enumerate(statuses) if status is BlockStatus.STORED]
        there = sum(status in THERE for status in statuses)
        manifests = [blobs[place].manifest for place in new]
        self._counts.add("objects_stored", len(new))
        self._counts.add("objects_not_stored", len(keys) - there)
        self._announced.stored([keys[place] for place in new], manifests)
        return L2StoreResult(there == len(keys), sum(each.block_bytes for each in manifests))

    def _find(self, keys: Sequence[ObjectKey], layouts: Mapping[int, Any]) -> Bitmap:
        known = {number: layout_of(desc.shapes, desc.dtypes) for number, desc in layouts.items()}
        asked: list[int] = []
        blobs: list[Blob] = []
        for place, key in enumerate(keys):
            layout = known.get(key.object_group_id)
            # LMCache's own check of adapters says no layouts.
            manifests = [self._manifests.of(key, layout)] if layout else self._manifests.all_of(key)
            if manifests:
                asked.append(place)
                blobs.append(Blob(manifests[0], name_of(key)))

        def keep(lease: Lease, places: list[int]) -> None:
            self._locks.add(lease, [keys[asked[at]] for at in places])

        here = [asked[at] for at in self._blobs.find(blobs, keep)]
        bitmap = Bitmap(len(keys))
        for place in here:
            bitmap.set(place)
        self._counts.add("objects_looked_up", len(keys))
        self._counts.add("objects_found", len(here))
        self._notify_keys_accessed([keys[place] for place in here])
        self._doubt(keys, here)
        return bitmap

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        statuses = self._blobs.get(self._placed(keys, objects))
        came = [place for place, status in enumerate(statuses) if status is BlockStatus.OK]
        for place in came:
            bitmap.set(place)
        corrupt = statuses.count(BlockStatus.CORRUPT)
        self._counts.add("objects_loaded", len(came))
        self._counts.add("objects_not_loaded", len(keys) - len(came))
        self._counts.add("objects_corrupt", corrupt)
        self._doubt(keys, came)
        if corrupt:
            log.warning("%d objects were corrupt and left the store", corrupt)
        return bitmap

    def _placed(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[Blob]:
        blobs = []
        for key, memory in zip(keys, objects, strict=True):
            about = memory.metadata
            layout = layout_of(about.shapes or [about.shape], about.dtypes or [about.dtype])
            if layout.size_bytes != memory.get_size():  # LMCache's serde has made it shorter
                raise ValueError(f"{memory.get_size()} bytes are not {layout.text}")
            manifest = self._manifests.of(key, layout)
            blobs.append(Blob(manifest, name_of(key), memory.data_ptr))
        return blobs

    def _release(self) -> None:
        """Give back the leases of which nothing is locked any more."""
        for _ in range(len(self._over)):
            try:
                lease = self._over.popleft()
                if not lease.release() and not lease.over:  # its connection was busy
                    self._over.append(lease)
            except (IndexError, KVStoreError):  # another thread took it, or it ended by itself
                continue

    def _before_beat(self) -> None:
        self._over.extend(self._locks.take_expired())
        self._release()
        if not self._reach.away:
            self._finding.submit(lambda: self._check(self._announced.next(CHECKED_AT_ONCE)))

    def _doubt(self, keys: Sequence[ObjectKey], here: Iterable[int]) -> None:
        """Check objects of which LMCache believes otherwise. The task's result does not wait."""
        there, last = set(here), zip(keys, self._announced.of(keys), strict=True)
        seen = {
            key: told
            for place, (key, told) in enumerate(last)
            if told and told.there is not (place in there)
        }
        if seen:
            self._finding.submit(lambda: self._check(seen))

    def _check(self, seen: Mapping[ObjectKey, Told]) -> None:
        """Ask the store whether it has these, and tell LMCache what has changed, if it answers."""
        held = self._blobs.held([Blob(told.manifest, name_of(key)) for key, told in seen.items()])
        if held is not None:
            self._announced.checked(seen, held)
