"""Loads from the memory of a store on this host into an engine's cache, with no copy between.

A rank maps the pool of the node, and vLLM's own copier addresses it: the pool is a table to it, of
which a row begins at every granule. Threads read the same bytes for their digests beside the copy.
When both have ended, the directory says whether they were those of the blocks all the time.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from kvrouter_store._core import BlockNames, Places, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.channel import Channel
from kvrouter_store.connectors.reach import Reach
from kvrouter_store.connectors.transfers import copying_threads
from kvrouter_store.connectors.vllm.pool_spec import PoolSpec
from kvrouter_store.connectors.vllm_tier.identity import PART
from kvrouter_store.identity.chain import HASH_BYTES

log = logging.getLogger("vllm.kvstore")

LOOK_S = 5.0  # that the start of an engine waits for the store's memory
PIECE_BYTES = 16 << 20  # that a thread digests at a time


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of a block: its pages begin at `slot` * `page_bytes`.

    verify: whether the ranks check digests, each those of its share of the blocks.
    """

    rank: int
    ranks: int
    slot: int
    page_bytes: int
    block_bytes: int
    verify: bool


class PoolRegion:
    """The pool of a node, as vLLM's copiers know their host memory (SharedOffloadRegion).

    Keeps the pool mapped until cleanup(). Nothing may write to it.
    """

    def __init__(self, channel: Channel, share: Share) -> None:
        assert channel.pool is not None
        size = self.total_size_bytes = channel.pool.size
        self._mapping: Any = channel.pool.slice(0, size)
        self.address = np.frombuffer(memoryview(self._mapping), dtype=np.int8).ctypes.data
        # PyTorch warns of memory that cannot be written to, unless it does not know.
        memory = (ctypes.c_char * size).from_address(self.address)
        self._base = torch.frombuffer(memory, dtype=torch.int8)
        self._row_stride = channel.hello.granule_bytes
        self._rows = (size - share.block_bytes) // self._row_stride + 1
        self._offset, self._canonical_offset = share.slot * share.page_bytes, 0
        self.rank, self.is_pinned = share.rank, False
        self.pinned_addresses: list[int] = []

    def create_next_worker_view(self, page_bytes: int) -> torch.Tensor:
        """The rank's page of the next tensor, in a block that begins at each row."""
        view = self._view(self._offset, page_bytes)
        self._offset += page_bytes
        return view

    def create_next_canonical_view(self, page_bytes: int) -> torch.Tensor:
        """The page of the next tensor over all ranks, in a block that begins at each row."""
        view = self._view(self._canonical_offset, page_bytes)
        self._canonical_offset += page_bytes
        return view

    def cleanup(self) -> None:
        """Give the pool up. Idempotent."""
        for address in self.pinned_addresses:
            host_unregister(address)
        self.pinned_addresses.clear()
        self._mapping = None

    def _view(self, offset: int, page_bytes: int) -> torch.Tensor:
        return torch.as_strided(self._base, (self._rows, page_bytes), (self._row_stride, 1), offset)


@dataclass(eq=False)
class Pool:
    """The pool of one life of the node, mapped. `copies` owns its region."""

    channel: Channel
    region: PoolRegion
    copies: OffloadingWorker
    share: Share

    @property
    def epoch(self) -> int:
        """The life of the node."""
        return self.channel.hello.epoch

    def find(self, spec: PoolSpec) -> list[Places] | None:
        """Where the directory has the blocks; None if not all are where they were leased."""
        directory = self.channel.directory
        if spec.epoch != self.epoch or directory is None:
            return None
        if max(spec.offsets, default=0) > self.region.total_size_bytes - self.share.block_bytes:
            return None  # no node says so that is sound
        found, first = [], 0
        for run in spec.runs:
            end = first + len(run.hashes) // HASH_BYTES
            names = BlockNames(run.spec_id, run.part_ids)
            try:
                places = directory.at(names, PART, run.hashes, spec.offsets[first:end])
            except ValueError:  # the connection broke, and took the directory with it
                return None
            if places is None:
                return None
            found.append(places)
            first = end
        return found

    def checks(self, spec: PoolSpec) -> Iterator[Callable[[], bool]]:
        """Whether blocks have their digests; those that are this rank's to check, by pieces."""
        if not (self.channel.hello.digests and self.share.verify):
            return
        share, stride = self.share, self.channel.hello.granule_bytes
        segments = Segments([self.region.address], [stride], [share.block_bytes], writable=False)
        rows = spec.block_ids[share.rank :: share.ranks].tolist()
        crcs = spec.crcs[share.rank :: share.ranks]
        most = max(1, PIECE_BYTES // share.block_bytes)
        for first in range(0, len(rows), most):
            piece = slice(first, first + most)
            yield partial(_agree, segments, rows[piece], crcs[piece])


def _agree(segments: Segments, rows: list[int], crcs: list[int]) -> bool:
    return segments.digests(rows) == crcs


@dataclass(eq=False)
class _Load:
    request_id: str
    pool: Pool
    places: list[Places]
    checks: list[Future[bool]]
    copied: TransferResult | None = None

    @property
    def over(self) -> bool:
        return self.copied is not None and all(check.done() for check in self.checks)

    @property
    def good(self) -> bool:
        """Whether every byte that was copied is of these blocks."""
        assert self.copied is not None
        there = all(each.stand() for each in self.places)
        return bool(self.copied.success) and there and all(each.result() for each in self.checks)


@dataclass
class PoolHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank tells when the engine starts: `epochs` as in PoolWorkerMetadata."""

    epochs: dict[int, int]


@dataclass
class PoolWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """VLLM's, and the lives of the node whose pools are mapped, by rank; 0: of none."""

    epochs: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: OffloadingWorkerMetadata) -> "PoolWorkerMetadata":
        """What two ranks, or steps, tell together."""
        assert isinstance(other, PoolWorkerMetadata)  # else one of them would be lost
        both, epochs = super().aggregate(other), self.epochs | other.epochs
        return PoolWorkerMetadata(both.completed_jobs, both.transfer_stats, epochs)


class PoolWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one rank: by `host` all but the loads from the pool.

    host: vLLM's worker over its own host memory; this object owns it. make: such a worker over a
    region. A thread maps the pool as soon as the node is there, and again when it was restarted.
    """

    def __init__(
        self,
        host: OffloadingWorker,
        share: Share,
        make: Callable[[PoolRegion], OffloadingWorker],
        client: StoreClient,
    ) -> None:
        self.host = host
        self.pool: Pool | None = None
        self._share, self._make, self._client = share, make, client
        self._retired: list[OffloadingWorker] = []
        self._loads: dict[int, _Load] = {}
        self._refused: list[TransferResult] = []
        self._failed: set[str] = set()
        self._told = self._unusable = 0
        self._looked = threading.Event()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(copying_threads(), thread_name_prefix="kvstore-digests")
        self._reach = Reach(client, log, self._look)
        self._reach.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache into vLLM's host memory."""
        return cast("bool", self.host.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into the cache, from vLLM's host memory or from the pool."""
        if not isinstance(src_spec, PoolSpec):
            return cast("bool", self.host.submit_load(job_id, src_spec, dst_spec))
        pool = self.pool
        places = None if pool is None else pool.find(src_spec)
        if pool is None or places is None:
            self._fail(src_spec.request_id, "are not where they were leased")
            self._refused.append(TransferResult(job_id, True, 0, 0.0))
            return True
        src_spec.begin(pool.channel.hello.granule_bytes)
        checks = [self._threads.submit(check) for check in pool.checks(src_spec)]
        self._loads[job_id] = _Load(src_spec.request_id, pool, places, checks)
        return cast("bool", pool.copies.submit_load(job_id, src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call. All succeeded for vLLM: see `take_failed`."""
        finished = [*self.host.get_finished(), *self._refused]
        self._refused.clear()
        for copies in {load.pool.copies for load in self._loads.values()}:
            for result in copies.get_finished():
                self._loads[result.job_id].copied = result
        for job_id, load in list(self._loads.items()):
            if load.over:
                del self._loads[job_id]
                finished.append(self._ended(job_id, load))
        self._retire()
        return finished

    def take_failed(self) -> set[str]:
        """Requests of finished jobs whose blocks of the cache hold anything."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_look(self) -> None:
        """Wait until the node was looked for once, at most LOOK_S."""
        self._looked.wait(LOOK_S)

    def take_epoch(self) -> dict[int, int]:
        """The life of the node whose pool this rank has mapped, 0 for none; {} if that was told."""
        pool = self.pool
        epoch = pool.epoch if pool is not None and pool.channel.usable else 0
        if epoch == self._told:
            return {}
        self._told = epoch
        return {self._share.rank: epoch}

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        self.host.wait(job_ids)
        for load in [self._loads[job_id] for job_id in job_ids if job_id in self._loads]:
            load.pool.copies.wait(job_ids)
            wait(load.checks)

    def shutdown(self) -> None:
        """End threads, the connection and the maps; copies that run end first."""
        self._reach.close()
        self._threads.shutdown()
        used = {load.pool.copies for load in self._loads.values()}
        self._loads.clear()
        self._replace(None)
        for copies in used.union(self._retired):
            copies.shutdown()
        self.host.shutdown()

    def _fail(self, request_id: str, why: str) -> None:
        log.warning("blocks in the store's memory %s: the prompt is computed (%s)", why, request_id)
        self._failed.add(request_id)

    def _ended(self, job_id: int, load: _Load) -> TransferResult:
        assert load.copied is not None
        if not load.good:
            self._fail(load.request_id, "are not what they were")
        return TransferResult(job_id, True, load.copied.transfer_size, load.copied.transfer_time)

    def _retire(self) -> None:
        """Give pools of former lives up, once nothing is copied from them."""
        if not self._retired:
            return
        with self._lock:
            retired, self._retired = self._retired, []
        busy = {load.pool.copies for load in self._loads.values()}
        for copies in retired:
            if copies in busy:
                self._retired.append(copies)
            else:
                copies.shutdown()

    # In the thread.

    def _look(self) -> None:
        """Map the pool of the node if that is not done. Raises KVStoreError where it is away."""
        try:
            self._find()
        finally:
            self._looked.set()

    def _find(self) -> None:
        if self.pool is not None and self.pool.channel.alive():
            return
        self._client.stats()
        channels = [each for each in self._client.channels() if each.alive()]
        channel = next((each for each in channels if each.directory is not None), None)
        if channel is None:
            return
        if self.pool is not None and self.pool.epoch == channel.hello.epoch:
            self.pool = replace(self.pool, channel=channel)
        elif channel.hello.epoch != self._unusable:
            self._replace(self._map(channel))

    def _map(self, channel: Channel) -> Pool | None:
        try:
            region = PoolRegion(channel, self._share)
            pool = Pool(channel, region, self._make(region), self._share)
        except Exception:
            self._unusable = channel.hello.epoch
            log.exception("the store's memory cannot be used: KV passes through vLLM's")
            return None
        mebibytes = region.total_size_bytes >> 20
        if region.is_pinned or current_platform.is_cpu():
            log.info("loads from the %d MiB of the store's memory", mebibytes)
            return pool
        pool.copies.shutdown()
        self._unusable = channel.hello.epoch
        log.warning(
            "the %d MiB of the store's memory cannot be pinned for this device: KV passes through "
            "vLLM's host memory; allow the engine to lock more memory (ulimit -l unlimited, or "
            "--ulimit memlock=-1 of its container)",
            mebibytes,
        )
        return None

    def _replace(self, pool: Pool | None) -> None:
        with self._lock:
            if self.pool is not None:
                self._retired.append(self.pool.copies)
            self.pool = pool
