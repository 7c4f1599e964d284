"""The connector for all kinds of attention and all devices that vLLM can offload from.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvrouter_store.connectors.vllm",
      "kv_connector_extra_config": {"url": "kv://127.0.0.1:7400"}}'

It is vLLM's own OffloadingConnector (vllm/distributed/kv_transfer/kv_connector/v1/
offloading_connector.py) over its tiered offloading, with the store as the tier below. VLLM's
scheduler decides what each cache group needs; this says what the blocks are, when they go to the
store, and what the router may wait for.

Two ways lead from the store to the engine's pages. `PoolWorker` copies from the store's own memory,
which the ranks have mapped: one lease for the whole prompt (`Leases`), vLLM's batch copy, digests
beside it, the directory's versions after it. What another host's node has is copied to the own one
first. Where there is none on the engine's host, or a device cannot pin its memory, `KVStoreTier`
brings blocks into vLLM's host memory first (`PinnedTiers`).

Promises: attention reads no byte whose digest was not checked, unless `verify` is off; what fails
is a failed receive, and computed; a store that is away, hangs or dies costs time only; nothing
stays held after a request. `tests/vllm/test_walks.py` walks all kinds of cache groups for that.

Tried: a connector of our own that copied between pages and store. It knew full attention alone, and
a hit was not faster (69.6 and 66.5 ms). To ask chunk by chunk: 78 ms of the scheduler's thread for
32,000 tokens, at once 14. To put each block of an answer alone: half of the steps of 100 streams
became longer; so answers go in batches (`GENERATED_TOKENS`).
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvrouter_store.connectors.vllm.identity import chain_root, identify
from kvrouter_store.connectors.vllm.leases import Leases
from kvrouter_store.connectors.vllm.names import NameCheck, may_share
from kvrouter_store.connectors.vllm.pace import Pace
from kvrouter_store.connectors.vllm.pool_worker import (
    PoolHandshake,
    PoolWorker,
    PoolWorkerMetadata,
)
from kvrouter_store.connectors.vllm.report import report
from kvrouter_store.connectors.vllm.room import Room
from kvrouter_store.connectors.vllm.self_test import check_names
from kvrouter_store.connectors.vllm.start import EngineSettings, check_start
from kvrouter_store.connectors.vllm.versions import ran_of
from kvrouter_store.connectors.vllm.weights import weights_revision

if TYPE_CHECKING:
    from kvrouter_store.connectors.vllm_tier.tier import KVStoreTier

log = logging.getLogger("vllm.kvstore")

NAME = "KVStoreConnector"
GENERATED_TOKENS = 128  # that a request offers together: with many streams each put delays all
IDLE_WAIT_S = 0.005  # a step without tokens waits for the store instead of spinning


class KVStoreConnector(OffloadingConnector):  # type: ignore[misc]
    """Shares an engine's KV blocks through a kvstore server.

    Raises ConnectorRefused (one sentence, with the flag to set) where the engine cannot work so.
    Without a reachable store the engine starts, and offloads to its own host memory.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        settings = check_start(vllm_config, kv_cache_config, vllm.__version__)
        identity = None
        if role == KVConnectorRole.SCHEDULER:
            identity = identify(vllm_config, kv_cache_config, settings)
        else:
            weights_revision(vllm_config, settings)  # refuses before it maps host memory
        self._settings = settings
        self._cache = vllm_config.cache_config
        self._block_tokens = self._cache.block_size
        self._alone = _have_failed_loads_computed(vllm_config)
        config = offloading_config(vllm_config, settings.cpu_bytes_to_use, identity)
        if settings.allow_untested:
            check_names()
        super().__init__(config, role, kv_cache_config)
        self._epochs: dict[int, int] = {}  # of the pools that ranks have mapped
        self._idle = False  # whether the last step had no tokens
        if identity is not None:
            self._pace = Pace()
            self._leases.windowed = [
                config.group_idx
                for config in self.scheduler.config.kv_group_configs
                if config.sliding_window_size_in_chunks is not None
            ]
            if not self._leases.windowed:  # else older blocks are gone by then
                offered = partial(_offered, self.scheduler._calc_num_offloadable_tokens)
                self.scheduler._calc_num_offloadable_tokens = offered
            unit = self.scheduler.config.tokens_per_hash
            self._names = NameCheck(chain_root(), unit, log)
            self._tier.arrivals.await_groups(
                {
                    config.group_idx: None if reach is None else reach * config.tokens_per_chunk
                    for config in self.scheduler.config.kv_group_configs
                    for reach in [config.sliding_window_size_in_chunks]
                }
            )
            self._log_groups()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any) -> Any:
        """The metrics of vLLM's tiered offloading."""
        return super().build_prom_metrics(offloading_config(vllm_config, 0, None), *more)

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        """Begin to follow the request. One whose blocks may not be shared moves none.

        What another connector fetches from the prefill engine (MultiConnector) is not loaded too.

        Steps end at multiples of the block size, where recurrent states are kept. When all is made,
        vLLM checks its configuration again (v1/engine/core.py, `_perform_handshakes`), and on a CPU
        forgets that blocks of a hybrid model are larger than 128 tokens.
        """
        self._cache.block_size = self._block_tokens
        super().on_new_request(request)
        status = self.scheduler._req_status[request.request_id]
        if not may_share(request) or not self._names.agree(request):
            status.max_load_tokens = status.max_offload_tokens = 0
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            status.max_load_tokens = 0
        if self._settings.save == "none":
            status.max_offload_tokens = 0

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's. Asks nothing for a request that waits, while nothing comes."""
        request_id, arrivals = request.request_id, self._tier.arrivals
        status = self.scheduler._req_status[request_id]
        context = status.req_context
        if self._room.waits(request_id) or arrivals.unchanged(context):
            return None, False
        compute_s = self._pace.seconds(request.num_tokens - num_computed_tokens)
        if self._asks(status, num_computed_tokens, compute_s):
            return None, False
        in_pool = self._leases.serves(context)
        if not in_pool:
            self._room.begin(request_id, context, compute_s)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if matched[0] is None:
            if not in_pool:
                self._room.deferred(request_id, arriving=arrivals.awaits(context))
            return matched
        arrivals.forget(context)
        if not in_pool:
            self._room.decided(request_id, loads=bool(matched[0]))
        elif not matched[0]:
            self._leases.drop(context)
        return matched

    def _asks(self, status: Any, computed: int, compute_s: float) -> bool:
        """Whether the store has yet to tell what it has of a request. It is asked for all of it."""
        context = status.req_context
        if status.max_load_tokens == 0 or status.req.skip_reading_prefix_cache:
            return False
        if status.transfer_jobs:
            return False  # vLLM waits for them
        status.update_offload_keys()
        groups = zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True)
        keys = [s.offload_keys[computed // c.tokens_per_chunk :] for c, s in groups]
        if not self.scheduler.manager.may_load(context):
            self._leases.release(context, elsewhere=True)
        if self._leases.serves(context):
            asks = self._leases.asks(chain.from_iterable(keys), context, compute_s)
            if asks or self._leases.serves(context):
                return asks
        absent = chain.from_iterable(map(self.scheduler.manager.absent, keys))
        return self._tier.lookups.asks(absent, context)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM's, which holds what it loads. All else that the request held is given up.

        What the store had is not offered to it again, unless another node had it.
        """
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        status = self.scheduler._req_status[request.request_id]
        if not num_external_tokens:
            self._leases.drop(status.req_context)
        there = self._leases.loaded(status.req_context)
        if not there and not self._tier.arrivals.elsewhere(status.req_context):
            there = self._room.from_store(request.request_id)
        for state in status.group_states if there else ():
            known = len(list(takewhile(there.__contains__, state.offload_keys)))
            state.next_stored_chunk_idx = max(state.next_stored_chunk_idx, known)
        self._room.release(request.request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's. A request that could not load from the store's memory is computed.

        It does not load a second time: vLLM 0.32 and 0.33 keep blocks in reserve for a request that
        loads, and after a failure keep them from itself (Scheduler._inflight_prefills).
        Ranks tell when they have mapped the store's memory.
        """
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, PoolWorkerMetadata):
            self._note_epochs(metadata.epochs)
        super().update_connector_output(connector_output)
        for request_id in connector_output.failed_recving or ():
            if (status := self.scheduler._req_status.get(request_id)) is not None:
                status.max_load_tokens = 0
                self._leases.examine(status.req_context)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Note which ranks have mapped the store's memory; a MultiConnector passes on others'."""
        for each in metadata.values():
            if isinstance(each, PoolHandshake):
                self._note_epochs(each.epochs)

    def _note_epochs(self, epochs: dict[int, int]) -> None:
        self._epochs.update(epochs)
        lives, told = {*self._epochs.values()}, len(self._epochs)
        everywhere = told == self.scheduler.config.num_workers and len(lives) == 1
        self._leases.epoch = lives.pop() if everywhere else 0

    def reset_cache(self) -> bool | None:
        """As vLLM's, for new weights: what the store holds of the old ones is not loaded again."""
        reset: bool | None = super().reset_cache()
        self._tier.renew()
        return reset

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's loads and stores. Steps without tokens wait for news of the store.

        But for the first of them: the step before it may yet be computed, and its output waits.
        """
        if preempted := scheduler_output.preempted_req_ids:
            # Those that a reset preempted may load in this step; vLLM asserts that they do not.
            loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
            scheduler_output = replace(scheduler_output, preempted_req_ids=preempted - loading)
            for request_id in preempted - loading:  # what it computed may be in the store by now
                self._leases.release(self.scheduler._req_status[request_id].req_context)
        self.scheduler.manager.ending = scheduler_output.finished_req_ids or ()
        metadata = super().build_connector_meta(scheduler_output)
        self._note_pace(scheduler_output)
        waits = self._tier.busy or self._room.waiting or self._leases.asking
        was_idle, self._idle = self._idle, not scheduler_output.num_scheduled_tokens
        if waits and was_idle and self._idle:
            self._tier.wait_news(IDLE_WAIT_S)
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; the router learns how many blocks were given to the store."""
        status = self.scheduler._req_status.get(request.request_id)
        self._room.release(request.request_id)
        self._pace.end(request.request_id, computed=bool(request.num_output_tokens))
        delay, _ = super().request_finished_all_groups(request, block_ids)
        return delay, {"kvstore": report(self.scheduler, status, self._tier, self._names.refusal)}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished_all_groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    # Worker side.

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completed now, and not with the next step.

        Copies nothing where the step broke off: vLLM calls this in a `finally`
        (v1/worker/kv_connector_model_runner_mixin.py); the later layers then hold older bytes.
        """
        if (cause := sys.exception()) is not None:
            log.warning("the forward pass broke off (%r): its KV is not shared", cause)
            return
        super().wait_for_save()
        side = self.connector_worker
        for job in side._unsubmitted_store_jobs:
            side.worker.submit_store(*job)
        side._unsubmitted_store_jobs.clear()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As vLLM's, with the requests whose blocks did not come as they were put."""
        results = super().get_transfer_results(finished_req_ids)
        if isinstance(worker := self.connector_worker.worker, PoolWorker):
            results.failed_recving.update(worker.take_failed())
        return results

    def get_handshake_metadata(self) -> Any:
        """Whose memory this rank has mapped; it waits a while for a store that is slow.

        A MultiConnector passes on what one of its connectors says, and another may depend on it.
        """
        worker = self.connector_worker.worker
        if not (self._alone and isinstance(worker, PoolWorker)):
            return None
        worker.wait_look()
        return PoolHandshake(worker.take_epoch())

    def build_connector_worker_meta(self) -> Any:
        """As vLLM's, and whose memory this rank has mapped, when that has changed."""
        metadata, side = super().build_connector_worker_meta(), self.connector_worker
        if side is None or not isinstance(side.worker, PoolWorker):
            return metadata
        epochs = side.worker.take_epoch()
        if metadata is None and not epochs:
            return None
        metadata = metadata or OffloadingWorkerMetadata()
        return PoolWorkerMetadata(metadata.completed_jobs, metadata.transfer_stats, epochs)

    def _log_groups(self) -> None:
        """What is shared, for operators who compare two engines."""
        tier, ran = self._tier, ran_of(vllm.__version__)
        log.info("%s shares KV through %s", tier.engine, self._settings.url)
        if ran != "engines":
            log.warning("of vLLM %s %s ran with this connector in its tests", vllm.__version__, ran)
        for config in self.scheduler.config.kv_group_configs:
            manifest = tier.links[config.group_idx].manifest
            reach = config.sliding_window_size_in_chunks
            log.info(
                "%s: blocks of %d tokens, a hit needs %s, manifest %s",
                manifest.spec.groups[0],
                config.tokens_per_chunk,
                "all of them" if reach is None else f"the last {reach}",
                manifest.digest.hex()[:16],
            )

    def _note_pace(self, scheduler_output: Any) -> None:
        self._pace.look(self._request)
        for new in scheduler_output.scheduled_new_reqs:
            if (request := self._request(new.req_id)) is not None:
                self._pace.begin(new.req_id, request.num_tokens - new.num_computed_tokens)

    def _request(self, request_id: str) -> Any:
        status = self.scheduler._req_status.get(request_id)
        return None if status is None else status.req

    @property
    def _room(self) -> Room:
        room: Room = self.scheduler.manager.room
        return room

    @property
    def _leases(self) -> Leases:
        leases: Leases = self.scheduler.manager.leases
        return leases

    @property
    def _tier(self) -> "KVStoreTier":
        tier: KVStoreTier = self.scheduler.manager.secondary_tiers[0]
        return tier


def offloading_config(vllm_config: Any, needed: int, identity: Any) -> Any:
    """A copy of the configuration that has the settings of vLLM's offloading in place of ours."""
    changed = copy(vllm_config)
    transfer = changed.kv_transfer_config = copy(vllm_config.kv_transfer_config)
    settings = EngineSettings.parse(transfer.kv_connector_extra_config, transfer.kv_role)
    transfer.kv_connector_extra_config = settings.as_offloading(
        transfer.kv_connector_extra_config, needed, identity
    )
    return changed


def _offered(offloadable: Callable[[Any, int], int], status: Any, computed: int) -> int:
    """How many of the tokens that are computed a request offers now: of its answer in batches."""
    tokens = offloadable(status, computed)
    generated: int = tokens - status.req.num_prompt_tokens
    if generated <= 0 or status.req.is_finished():
        return tokens
    return tokens - generated % GENERATED_TOKENS


def _have_failed_loads_computed(vllm_config: Any) -> bool:
    """Have vLLM compute what cannot be loaded, not fail the request. Whether no other connector is.

    Its scheduler reads the setting after it has made its connector. A MultiConnector gives a copy
    of the configuration to those that it makes, and has the one that counts.
    """
    frames = (frame.f_locals for frame, _ in walk_stack(None))
    makers = [names for names in frames if isinstance(names.get("self"), MultiConnector)]
    for config in (vllm_config, *(each.get("vllm_config", vllm_config) for each in makers)):
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
    return not makers


with suppress(ValueError):  # it is registered
    # MultiConnector finds the class that reads a connector's statistics by this name alone.
    KVConnectorFactory.register_connector(NAME, __name__, NAME)
