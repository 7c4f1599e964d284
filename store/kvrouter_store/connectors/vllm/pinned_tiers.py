"""VLLM's manager of tiers, which pins what was promoted until its request has loaded it.

VLLM's own (vllm/v1/kv_offload/tiering/manager.py) says MISS where the host memory is full, and lets
chunks that were promoted for one request be evicted by another before the first is asked for again
(vllm issue 49902). Many hits at once then push each other out, and are computed.

What a store on the same host has, or can get from another host, is not promoted: the ranks load it
from the store's own memory.
"""

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TieringOffloadingMetrics, TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvrouter_store.connectors.vllm.host_chunks import HostChunks
from kvrouter_store.connectors.vllm.leases import Leases
from kvrouter_store.connectors.vllm.pool_spec import PoolSpec
from kvrouter_store.connectors.vllm.room import Chunk, Found, Room

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.runs import InOrder

log = logging.getLogger("vllm.kvstore")

FOUND = {LookupResult.MISS: Found.MISS, LookupResult.RETRY: Found.UNKNOWN}
STORE = 0  # the only tier below
LAST_WAIT_S = 0.1  # of a step, for room for what requests leave behind


class PinnedTiers(TieringOffloadingManager):  # type: ignore[misc]
    """Its look-ups promise chunks that the end of the step brings, if `room` has some.

    ending: requests that have ended; what this step does not store of them is lost. leases: what
    requests load from the store's own memory, if they do.
    """

    def __init__(self, primary_tier: HostChunks, tiers: list[Any]) -> None:
        super().__init__(primary_tier, tiers)
        self._complained = False
        self.room = Room(self)
        self.leases = Leases(tiers[STORE].links, tiers[STORE].news, tiers[STORE].copies.fetch)
        self.ending: Collection[str] = ()
        self._written: dict[str, list[InOrder]] = {}  # by request: what is on its way from ranks
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
            arrivals = self.secondary_tiers[STORE].arrivals
            landed = arrivals.lookup(key, context)
            node = arrivals.node_of(key, context) if landed else ""
            again = landed is True and self.leases.landed(key, context, node)
            missing = landed is not None and not again
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
        held = getattr(self, "_promotions_held", False)  # 0.33: a rank may yet write after a reset
        if held or not self.may_load(context):
            return LookupResult.MISS
        found: LookupResult = self.secondary_tiers[STORE].lookup(key, context)
        return LookupResult.HIT_PENDING if found is LookupResult.HIT else found

    def may_load(self, context: ReqContext) -> bool:
        """Whether a request may load from the store, by its `load_tiers`."""
        tier = self.secondary_tiers[STORE]
        return bool(context.load_tier_filter.allows(tier.medium, tier.locality))

    def absent(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Those that are not in the host memory. Counts them, and the others, by vLLM's metrics."""
        absent: list[OffloadKey] = self.primary_tier.table.absent(keys)
        self._count(self._metrics.primary_tier_label, len(keys), len(keys) - len(absent))
        self._count(self._metrics.tier_label(STORE), len(absent), 0)
        return absent

    def _count(self, labels: Any, asked: int, found: int) -> None:
        stats, names = self._metrics._stats, TieringOffloadingMetrics
        stats.increase_counter(names.CHUNK_QUERIES, asked, labels)
        stats.increase_counter(names.CHUNK_HITS, found, labels)

    def _initiate_promotion(self, tier_idx: int, key: OffloadKey, req_context: ReqContext) -> bool:
        return True  # by `bring`, all of a request at once

    def _complete_promotion(self, job_metadata: Any, completed_job: JobResult) -> None:
        super()._complete_promotion(job_metadata, completed_job)
        self.room.came(job_metadata.transfer_job.keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As vLLM's. For what a request leaves behind, waits while the store takes other chunks."""
        prepared = self._prepare_store(keys, req_context)
        begun = time.monotonic()
        until = begun + (self._patience_s if req_context.req_id in self.ending else 0.0)
        while prepared is None and (left_s := until - time.monotonic()) > 0 and self._cascades():
            self.secondary_tiers[STORE].wait_news(left_s)
            prepared = self._prepare_store(keys, req_context)
        self._patience_s -= time.monotonic() - begun
        return prepared

    def _prepare_store(
        self, keys: Collection[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._process_finished_jobs()
        prepared = self.primary_tier.prepare_store(keys, context)
        if prepared is None:
            return None
        new = prepared.keys_to_store
        if new:
            self._req_state[context.req_id].pending_primary_stores += 1
            self._written.setdefault(context.req_id, []).append(new)
        if len(new) < len(keys):
            there = tuple(set(keys).difference(new))
            self._cascade_existing_chunks_to_request_level_tiers(there, context, {STORE})
        return prepared

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Chunks were written: put them. Another request may wait for what one has computed."""
        written = self._written[req_context.req_id]
        batch = written.pop(next(n for n, each in enumerate(written) if each[0] in keys))
        if not written:
            del self._written[req_context.req_id]
        job = TransferJob(
            job_id=self._next_job_id(),
            keys=batch,
            chunk_ids=self.primary_tier.pass_on(batch),
            is_promotion=False,
            req_context=req_context,
        )
        self._register_job(job, STORE)
        self.secondary_tiers[STORE].submit_store(job)
        self.room.came(batch)
        self._req_state[req_context.req_id].pending_primary_stores -= 1
        self._maybe_finalize_request(req_context.req_id)

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

    def take_events(self) -> Iterable[OffloadingEvent]:
        """As vLLM's; but what passes the host memory is not told while nobody loads it from there.

        A router would expect it there after the store has evicted it.
        """
        pool = self.leases.epoch
        return (each for each in super().take_events() if each.removed or not pool)

    def reset_cache(self) -> None:
        """As vLLM's, which drops all chunks, with their pins."""
        super().reset_cache()
        self._written.clear()
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
        return int(self.primary_tier.table.chunks)

    @property
    def free(self) -> int:
        """Chunks that are free, or may be evicted."""
        return int(self.primary_tier.table.free)

    def states(self, keys: Iterable[bytes]) -> list[Chunk]:
        """Where each of these chunks is."""
        return list(map(self.primary_tier.table.state, keys))

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
