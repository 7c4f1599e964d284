"""VLLM's manager of tiers, which pins what was promoted until its request has loaded it.

VLLM's own (vllm/v1/kv_offload/tiering/manager.py) says MISS where the host memory is full, and lets
chunks that were promoted for one request be evicted by another before the first is asked for again
(vllm issue 49902). Many hits at once then push each other out, and are computed.

What a store on the same host has is not promoted: the ranks load it from the store's own memory.
"""

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TieringOffloadingMetrics, TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvrouter_store.connectors.vllm.leases import Leases
from kvrouter_store.connectors.vllm.pool_spec import PoolSpec
from kvrouter_store.connectors.vllm.room import Chunk, Found, Room

log = logging.getLogger("vllm.kvstore")

FOUND = {LookupResult.MISS: Found.MISS, LookupResult.RETRY: Found.UNKNOWN}
STORE = 0  # the only tier below
STATES = {-1: Chunk.COMING, 0: Chunk.IDLE}  # by a chunk's ref_cnt; all others are held
LAST_WAIT_S = 0.1  # of a step, for room for what requests leave behind


class PinnedTiers(TieringOffloadingManager):  # type: ignore[misc]
    """Its look-ups promise chunks that the end of the step brings, if `room` has some.

    ending: requests that have ended; what this step does not store of them is lost. leases: what
    requests load from the store's own memory, if they do.
    """

    def __init__(self, primary_tier: CPUPrimaryTierOffloadingManager, tiers: list[Any]) -> None:
        super().__init__(primary_tier, tiers)
        self._complained = False
        self.room = Room(self)
        self.leases = Leases(tiers[STORE].links, tiers[STORE].news)
        self.ending: Collection[str] = ()
        self._patience_s = LAST_WAIT_S  # of this step

    def lookup(
        self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        """As vLLM's; a miss for what the request does not wait for.

        It does by itself what vLLM's does, which takes four times as long: for each chunk it
        observes how long.
        """
        if key in self.leases.places(req_context):
            return LookupResult.HIT
        if self.leases.serves(req_context):
            return self._in_pool(key, req_context)
        self._maybe_process_finished_jobs()
        found = self.primary_tier.lookup(key, req_context)
        if found is LookupResult.MISS and exclude_tier_idx != STORE:
            found = self._below(key, req_context)
        may_wait = self.room.found(req_context.req_id, key, FOUND.get(found, Found.THERE))
        return found if found is LookupResult.HIT or may_wait else LookupResult.MISS

    def _in_pool(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        missing = self.leases.misses(key, context)
        if missing:
            landed = self.secondary_tiers[STORE].arrivals.lookup(key, context)
            missing = landed is False or (landed is True and not self.leases.landed(key, context))
        return LookupResult.MISS if missing else LookupResult.RETRY

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """As vLLM's, or where in the store's memory the chunks are."""
        if not self.leases.serves(req_context):
            return super().prepare_load(keys, req_context)
        tier = self.secondary_tiers[STORE]
        sources = self._request_load_sources.setdefault(req_context.req_id, {})
        sources.update(dict.fromkeys(keys, tier.cache_hit_source))
        self._metrics._stats.increase_counter(
            TieringOffloadingMetrics.READ_BYTES,
            len(keys) * tier.block_size_bytes,
            self._metrics.tier_label(STORE),
        )
        return PoolSpec(req_context.req_id, self.leases.epoch, *self.leases.load(keys, req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As vLLM's, or give back what was leased."""
        if self.leases.serves(req_context):
            self.leases.release(req_context)
        else:
            super().complete_load(keys, req_context)

    def _below(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        if not self.may_load(context):
            return LookupResult.MISS
        found: LookupResult = self.secondary_tiers[STORE].lookup(key, context)
        return LookupResult.HIT_PENDING if found is LookupResult.HIT else found

    def may_load(self, context: ReqContext) -> bool:
        """Whether a request may load from the store, by its `load_tiers`."""
        tier = self.secondary_tiers[STORE]
        return bool(context.load_tier_filter.allows(tier.medium, tier.locality))

    def absent(self, keys: Iterable[OffloadKey]) -> Iterator[OffloadKey]:
        """Those that are not in the host memory. Counts them, and the others, by vLLM's metrics."""
        find, asked, found = self.primary_tier._policy.get, 0, 0
        for key in keys:
            asked += 1
            if find(key) is None:
                yield key
            else:
                found += 1
        self._count(self._metrics.primary_tier_label, asked, found)
        self._count(self._metrics.tier_label(STORE), asked - found, 0)

    def _count(self, labels: Any, asked: int, found: int) -> None:
        stats, names = self._metrics._stats, TieringOffloadingMetrics
        stats.increase_counter(names.CHUNK_QUERIES, asked, labels)
        stats.increase_counter(names.CHUNK_HITS, found, labels)

    def _initiate_promotion(self, tier_idx: int, key: OffloadKey, req_context: ReqContext) -> bool:
        return True  # by `bring`, all of a request at once

    def _complete_promotion(self, job_metadata: Any, completed_job: JobResult) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        self.room.came(job_metadata.transfer_job.keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As vLLM's; another request may wait for what one has computed."""
        super().complete_store(keys, req_context, success)
        self.room.came(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As vLLM's. For what a request leaves behind, waits while the store takes other chunks."""
        prepared = super().prepare_store(keys, req_context)
        begun = time.monotonic()
        until = begun + (self._patience_s if req_context.req_id in self.ending else 0.0)
        while prepared is None and (left_s := until - time.monotonic()) > 0 and self._cascades():
            self.secondary_tiers[STORE].wait_news(left_s)
            self._process_finished_jobs()
            prepared = super().prepare_store(keys, req_context)
        self._patience_s -= time.monotonic() - begun
        return prepared

    def _cascades(self) -> bool:
        return not all(job.transfer_job.is_promotion for job in self._jobs.values())

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """As vLLM's, and promote."""
        self._maybe_process_finished_jobs()
        self._patience_s = LAST_WAIT_S
        self.room.grant()
        self.leases.flush()
        if any(counts := self.leases.take_counts()):
            self._count(self._metrics.tier_label(STORE), *counts)
        super().on_schedule_end(context)

    def on_request_finished(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> None:
        """As vLLM's; it holds nothing any more."""
        self.room.release(req_context.req_id)
        self.leases.ended(req_context)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    def reset_cache(self) -> None:
        """As vLLM's, which drops all chunks, with their pins."""
        super().reset_cache()
        self.room.forget()
        self.leases.forget()

    def shutdown(self) -> None:
        """As vLLM's; leases are given back before the connections end."""
        self.leases.forget()
        self.leases.close()
        super().shutdown()

    # The memory, as `room` sees it.

    @property
    def chunks(self) -> int:
        """All of it."""
        return int(self.primary_tier._num_chunks)

    @property
    def free(self) -> int:
        """Chunks that are free, or may be evicted."""
        primary = self.primary_tier
        return int(primary._get_num_free_chunks() + primary._num_evictable_cache_chunks)

    def states(self, keys: Iterable[bytes]) -> list[Chunk]:
        """Where each of these chunks is."""
        chunks = map(self.primary_tier._policy.get, keys)
        return [
            Chunk.ABSENT if each is None else STATES.get(each.ref_cnt, Chunk.HELD)
            for each in chunks
        ]

    def pin(self, keys: Collection[bytes], context: ReqContext) -> None:
        """Let chunks that are there not be evicted."""
        self.primary_tier.prepare_read(keys, context)

    def unpin(self, keys: Collection[bytes], context: ReqContext) -> None:
        """Undo a pin."""
        self.primary_tier.complete_read(keys, context)

    def bring(self, keys: Collection[bytes], context: ReqContext) -> bool:
        """Begin to bring chunks that are absent; False where there is no room."""
        written = self.primary_tier.prepare_write(keys, context)
        if written is None:
            return False
        tier = self.secondary_tiers[STORE]
        sources = self._request_load_sources.setdefault(context.req_id, {})
        sources.update(dict.fromkeys(written.keys_to_store, tier.cache_hit_source))
        self._count(self._metrics.tier_label(STORE), 0, len(keys))
        job = TransferJob(
            job_id=self._next_job_id(),
            keys=written.keys_to_store,
            chunk_ids=written.store_spec.chunk_ids,
            is_promotion=True,
            req_context=context,
        )
        self._register_job(job, STORE)
        tier.submit_load(job)
        return True

    def short(self, chunks: int) -> None:
        """So many chunks are computed for want of room, although the store has them."""
        for _ in range(chunks):
            self._metrics.on_promotion_allocation_failure()
        if not self._complained:
            self._complained = True
            log.warning(
                "the host memory has no room for all that waits at once: prompts are computed "
                'although the store has them; set "cpu_bytes_to_use" higher than %d bytes '
                "(vllm:kv_offload_tiering_promotion_allocation_failures_total counts the blocks)",
                self.chunks * self.secondary_tiers[STORE].block_size_bytes,
            )
