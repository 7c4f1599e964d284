"""The store as a tier below vLLM's own offloading: class KVStoreTier.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
          {"type": "KVStoreTier", "module_path": "kvrouter_store.connectors.vllm_tier",
           "url": "kv://127.0.0.1:7400"}]}}'

vLLM moves KV between the device and its pinned host memory; this moves chunks between that memory
and the store, in threads of its own, and so serves every device that vLLM can offload from. All
methods but batch_lookup are called by the scheduler's thread (vllm/v1/kv_offload/tiering/base.py).
"""

import ctypes
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.results import THERE
from kvrouter_store.connectors.landings import Landings
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.neighbours import Neighbours
from kvrouter_store.connectors.settings import ConnectorSettings
from kvrouter_store.connectors.transfers import Finished, Transfers, copying_threads
from kvrouter_store.connectors.vllm_tier.arrivals import Arrivals
from kvrouter_store.connectors.vllm_tier.copies import NodeCopies
from kvrouter_store.connectors.vllm_tier.identity import (
    PART,
    ChunkIdentity,
    chunk_manifests,
    gpus_of,
    identify,
)
from kvrouter_store.connectors.vllm_tier.lookups import ChunkLookups
from kvrouter_store.connectors.vllm_tier.runs import Run, cut, runs_of
from kvrouter_store.errors import KVStoreError
from kvrouter_store.identity.chain import HASH_BYTES

log = logging.getLogger("vllm.kvstore")

PIECE_BYTES = 32 << 20  # of a transfer, which one thread moves at a time


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps chunks in a kvstore node. Without a reachable store vLLM goes on with its own memory.

    Takes what `ConnectorSettings` says, and `threads` that move chunks (0: by the cores). Raises
    ConnectorRefused where they cannot be used. Owns threads and connections: shutdown() ends them.

    pinned: vLLM's manager keeps what was brought until its request has loaded it.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        threads: int = 0,
        identity: ChunkIdentity | None = None,
        pinned: bool = False,
        **extra: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = ConnectorSettings.parse(extra, "kv_both")
        config = offloading_spec.config
        identity = identity or identify(config, settings)
        manifests = chunk_manifests(config, self.block_size_bytes, identity, vllm.__version__)
        self.engine = name = identity.engine
        gpus = gpus_of(config.parallel, len(manifests), torch.accelerator.device_count())
        self.links = {
            group: StoreLink(settings.client(name, *gpu), manifest, log, engine=name)
            for (group, manifest), gpu in zip(manifests.items(), gpus, strict=True)
        }
        self._manifests, self._renewals = manifests, 0
        self._update_group = settings.update_group
        self.news = threading.Event()
        self.memory = _segments_of(primary_kv_view)
        self._transfers: Transfers[OffloadKey] = Transfers(
            threads or copying_threads(), "kvstore-tier", self.news
        )
        self.lookups = ChunkLookups(tier_type, self.links, self.news)
        self.node = settings.node
        self._neighbours = Neighbours(
            lambda node: settings.at(node).client(name, *gpus[0]), StoreClient.close
        )
        self.copies = NodeCopies(self.links, self._neighbours)
        waiter = f"{name}/landings"
        self._landings = Landings(lambda node: settings.at(node).waiter(waiter), self.news, log)
        self.arrivals = Arrivals(
            self._landings,
            config.cache.tokens_per_hash,
            lambda group: self.links[group].manifest,
            settings.sources,
        )
        self._jobs: dict[int, TransferJob] = {}
        self._pinned = pinned
        self._room = len(primary_kv_view)  # chunks
        self._brought: dict[str, set[OffloadKey]] = {}  # by request: chunks that were loaded for it
        for link in self.links.values():
            link.start()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the store has the chunk; unknown the first time that a request asks.

        Unless they are pinned, no for a chunk that was brought once and is gone again, and for more
        than there is room for: chunks of those that wait would push each other out for ever.
        """
        brought = self._brought.get(req_context.req_id, ())
        if key in brought or len(brought) >= self._room:
            return LookupResult.MISS
        found = self.lookups.lookup(key, req_context)
        if found is False:
            found = self.arrivals.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Put chunks; those in the store are not sent again."""
        self._submit(job_metadata, self._store, runs_of(job_metadata, remember=True))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Get chunks into vLLM's memory, each checked against its digest."""
        context = job_metadata.req_context
        runs = runs_of(job_metadata, partial(self.arrivals.node_of, context=context))
        if not self._pinned:
            self._brought.setdefault(context.req_id, set()).update(job_metadata.keys)
        self._submit(job_metadata, self._load, runs)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended; of a load that failed in part, which chunks came."""
        return [self._result(each) for each in self._transfers.take()]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """All chunks of a request are offered: the store may have lost what vLLM's memory holds."""
        self.arrivals.begin(req_context)
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the lookups of the request, and what is on its way to it."""
        self.arrivals.forget(req_context)
        self._brought.pop(req_context.req_id, None)
        self.lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the store for all lookups of this step at once."""
        self.lookups.flush()
        self.arrivals.follow()

    @property
    def away(self) -> bool:
        """Whether the store is known to be away."""
        return any(link.away for link in self.links.values())

    @property
    def busy(self) -> bool:
        """Whether the store has been asked something that it has not answered."""
        return bool(self._jobs) or self.lookups.asking or self.arrivals.waiting

    def wait_news(self, timeout_s: float) -> None:
        """Wait until the store answered anything since the last call, at most `timeout_s`."""
        self.news.wait(timeout_s)
        self.news.clear()

    def renew(self) -> None:
        """Name chunks otherwise from now on: the weights may have changed. Nothing may be moving.

        Engines of one update group share again that were renewed as often. Nothing else says that
        they have the same weights: one may have been started anew since.
        """
        if not self._update_group:
            log.warning('no "update_group" is set: this engine shares its blocks with no other now')
            self._update_group = secrets.token_hex(8)
        self._renewals += 1
        for group, manifest in self._manifests.items():
            revision = f"{manifest.spec.weights_revision}, {self._update_group} {self._renewals}"
            spec = replace(manifest.spec, weights_revision=revision)
            self.links[group].rename(replace(manifest, spec=spec))

    def drain_jobs(self) -> None:
        """Wait until no transfer touches vLLM's memory."""
        self._transfers.drain()

    def shutdown(self) -> None:
        """End threads and connections; transfers that run end first."""
        self.lookups.shutdown()
        self._transfers.close()
        self._landings.close()
        self.copies.close()
        self._neighbours.close()
        for link in self.links.values():
            link.close()

    def _submit(
        self, job: TransferJob, move: Callable[[Run], list[OffloadKey]], runs: list[Run]
    ) -> None:
        """A thread copies less than a host's memory gives: a long run is work for several."""
        most = max(1, PIECE_BYTES // self.block_size_bytes)
        pieces = [piece for run in runs for piece in cut(run, most)]
        self._jobs[job.job_id] = job
        self._transfers.submit(job.job_id, [partial(move, piece) for piece in pieces])

    def _store(self, run: Run) -> list[OffloadKey]:
        """The chunks of the run that the store has now; what it had before is not sent again."""
        link = self.links[run.group]
        held = link.match(run.chain[run.span.start * HASH_BYTES :])
        span, chunk_ids = run.span[held:], run.chunk_ids[held:]
        put = link.put(PART, run.chain, span, self.memory, chunk_ids) if span else None
        statuses = put.statuses if put is not None else ()
        new = zip(run.keys[held:], statuses, strict=False)
        return run.keys[:held] + [key for key, status in new if status in THERE]

    def _load(self, run: Run) -> list[OffloadKey]:
        """The chunks of the run that came as they were put."""
        statuses = self._get(run)
        lost = [status.name.lower() for status in statuses if status is not BlockStatus.OK]
        if lost:
            log.warning(
                "%d of %d blocks did not come (%s): vLLM computes from there on",
                *(len(lost), len(run.keys), ", ".join(sorted(set(lost)))),
            )
        came = zip(run.keys, statuses, strict=True)
        return [key for key, status in came if status is BlockStatus.OK]

    def _get(self, run: Run) -> list[BlockStatus]:
        """Get the chunks of the run from the node that has them; all are missing if it is away."""
        link = self.links[run.group]
        wanted = PART, run.chain, run.span, self.memory, run.chunk_ids
        if not run.node:
            return link.get_into(*wanted)
        try:
            with self._neighbours.client(run.node) as client:
                return client.get_into(link.manifest, *wanted)
        except KVStoreError as error:
            log.warning("%s: %s", run.node, error)
            return [BlockStatus.MISSING] * len(run.span)

    def _result(self, done: Finished[OffloadKey]) -> JobResult:
        job, moved = self._jobs.pop(done.job_id), done.results
        success = len(moved) == len(job.keys)
        if job.is_promotion and not success:
            # Or vLLM would ask for what cannot be had again and again.
            lost = set(job.keys).difference(moved)
            self.lookups.mark_miss(lost)
            self.arrivals.lose(lost, job.req_context)
        return JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=tuple(moved) if job.is_promotion and moved and not success else None,
            transfer_time=done.seconds,
            transfer_bytes=len(moved) * self.block_size_bytes,
        )


def _segments_of(view: memoryview) -> Segments:
    """VLLM's memory by chunks. Keeps no hold on the view, which vLLM releases after shutdown()."""
    assert view.strides is not None
    chunk_bytes = view.strides[0]
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return Segments([address], [chunk_bytes], [chunk_bytes], blocks=len(view))
