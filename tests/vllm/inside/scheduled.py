"""An engine without a model: vLLM's scheduler and the connector, over cache groups made by hand.

The groups may be of kinds that no CPU backend computes. A forward pass first compares every byte
that attention would read, then writes what the step computes: of each block a pattern that its
hash, its layer and the weights determine.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from tests.vllm.inside.groups import Cache, Kind, cached, content, layer_specs, read, written
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvrouter_store.connectors.vllm import KVStoreConnector
from kvrouter_store.connectors.vllm.pool_spec import PoolSpec

STEP_TOKENS = 256
HASH = sha256_cbor
NULL_BLOCK = 0

init_none_hash(HASH)


@dataclass
class Rank:
    """One rank: its cache, and its connector once it has begun."""

    number: int
    cache: Cache
    worker: Any = None

    def begin(self, config: VllmConfig) -> None:
        """Make the connector, in this process."""
        config = copy(config)
        config.parallel_config = copy(config.parallel_config)
        config.parallel_config.rank = self.number
        self.worker = KVStoreConnector(config, KVConnectorRole.WORKER, self.cache.config)
        with set_current_vllm_config(config):
            self.worker.register_kv_caches(self.cache.views)


class Engine:
    """One engine. Its owner must close it."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        blocks: int,
        settings: dict[str, Any],
        *,
        ranks: int = 1,
        scheduler_first: bool = False,
        longest: int = 4096,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self.config = configured(
            model, kind, blocks, settings, ranks=ranks, longest=longest, step_tokens=step_tokens
        )
        self.ranks = [Rank(number, cached(kind, blocks, ranks)) for number in range(ranks)]
        self.cache = self.ranks[0].cache.config
        tokens = resolve_kv_cache_block_sizes(self.cache, self.config)
        for rank in self.ranks:
            self._scheduler_tokens, rank.cache.config.hash_block_size = tokens
        self._gathered = KVOutputAggregator(ranks)
        self.scheduler: Scheduler
        begin = [self._begin_workers, self._begin_scheduler]  # vLLM's order
        for each in reversed(begin) if scheduler_first else begin:
            each()
        self.connector: Any = self.scheduler.connector
        told = {(0, rank.number): rank.worker.get_handshake_metadata() for rank in self.ranks}
        if None not in told.values():
            self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self._hasher = get_request_block_hasher(self.cache.hash_block_size, HASH)
        self._numbers = count()
        self._weights = 0  # how often they were renewed
        self.computed = 0  # tokens
        self.compared = 0  # blocks
        self.loaded: Counter[int] = Counter()  # blocks by group
        self.from_pool = 0  # loads from the store's own memory
        self.failed = 0  # of these
        self.honoured = 0  # blocks that a hint named, and that came

    def _begin_workers(self) -> None:
        for rank in self.ranks:
            rank.begin(self.config)

    def _begin_scheduler(self) -> None:
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=generate_scheduler_kv_cache_config(
                [rank.cache.config for rank in self.ranks]
            ),
            log_stats=False,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self._scheduler_tokens,
            hash_block_size=self.cache.hash_block_size,
        )

    def ask(
        self,
        tokens: Sequence[int],
        max_tokens: int = 1,
        salt: str | None = None,
        coming: tuple[int, float] | None = None,
        **params: Any,
    ) -> str:
        """Add a request; its id. `coming`: so many blocks will land within so many seconds.

        params: further ones of `kv_transfer_params`.
        """
        about = {"coming_blocks": coming[0], "wait_s": coming[1]} if coming else {}
        params = {"kv_transfer_params": {"kvstore": about, **params}}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=params)
        sampling.update_from_generation_config({}, 2)
        request = Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return str(request.request_id)

    def abort(self, request_id: str) -> None:
        """The client left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self, *, running: bool = False, weights: bool = False) -> None:
        """Reset the engine's own prefix cache.

        With `running`, all requests start again; with `weights`, there are new weights. vLLM raises
        RuntimeError while a load is under way.
        """
        self.scheduler.reset_prefix_cache(running, weights)
        self._weights += weights

    @property
    def requests(self) -> list[str]:
        """Those that have not ended."""
        return list(self.scheduler.requests)

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        scheduler = self.scheduler
        return not (
            scheduler.requests
            or scheduler.finished_req_ids
            or self.connector.has_pending_push_work()
        )

    @property
    def worker(self) -> Any:
        """The connector of the first rank."""
        return self.ranks[0].worker

    def step(self) -> None:
        """One step of the engine core."""
        output = self.scheduler.schedule()
        for job in output.kv_connector_metadata.load_jobs.values():
            self.loaded.update(dict(enumerate(job.dst_spec.group_sizes)))
            self.from_pool += isinstance(job.src_spec, PoolSpec)
        answers = [self._step_of(rank, output) for rank in self.ranks]
        self.computed += sum(output.num_scheduled_tokens.values())
        told = self.scheduler.update_from_output(output, self._gathered.aggregate(answers))
        for each in (each for outputs in told.values() for each in outputs.outputs):
            fetched = (each.kv_transfer_params or {}).get("kvstore", {}).get("fetch")
            self.honoured += fetched["honoured"] if fetched else 0

    def _step_of(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        """What one rank does in a step, and its answer."""
        worker, scheduled = rank.worker, output.num_scheduled_tokens
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # a copy of its own
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for request_id, tokens in scheduled.items():
            self._compute(rank, self.scheduler.requests[request_id], tokens)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        self.failed += len(results.failed_recving)
        worker.clear_connector_metadata()
        return sampled(self.scheduler, list(scheduled), told)

    def waiting(self) -> str:
        """What requests that do not end wait for."""
        manager = self.connector.scheduler.manager
        (tier,) = manager.secondary_tiers
        chunks = manager.primary_tier.table.there
        claims = manager.room._claims
        return f"{self.requests} wait, {chunks} chunks, jobs {tier._jobs}, claims {claims}"

    def leaks(self) -> dict[str, int]:
        """What an idle engine still holds; empty if nothing."""
        pool = self.scheduler.kv_cache_manager.block_pool
        manager = self.connector.scheduler.manager
        table = manager.primary_tier.table
        found = {
            "blocks": self.cache.num_blocks - 1 - pool.get_num_free_blocks(),
            "jobs": len(manager._transfer_jobs),
            "chunks": table.chunks - table.free,
            "written": len(manager._written),
            "requests": len(self.connector.scheduler._req_status),
            "pins": manager.room.pinned(),
            "claims": len(manager.room._claims),
            "leases": manager.leases.holding,
        }
        return {name: number for name, number in found.items() if number}

    def close(self) -> None:
        """End threads, connections and memory."""
        for rank in self.ranks:
            rank.worker.shutdown()
        self.connector.shutdown()

    # The forward pass.

    def _compute(self, rank: Rank, request: Any, tokens: int) -> None:
        """Compare what the step reads, and write what it computes."""
        begin = request.num_computed_tokens - tokens  # schedule() has counted them already
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        groups = rank.cache.config.kv_cache_groups
        for number, group in enumerate(groups):
            for index in read(group.kv_cache_spec, begin):
                where = request.request_id, rank.number, number, index, tables[number][index]
                assert tables[number][index] != NULL_BLOCK, where
                for page, expected in self._blocks(rank, request, group, index, tables[number]):
                    assert torch.equal(page, expected), where
                self.compared += 1
        for number, group in enumerate(groups):
            for index in written(group.kv_cache_spec, begin, begin + tokens):
                if index < min(len(tables[number]), len(request.block_hashes)):
                    for page, computed in self._blocks(rank, request, group, index, tables[number]):
                        page[:] = computed

    def _blocks(
        self, rank: Rank, request: Any, group: Any, index: int, table: Sequence[int]
    ) -> Iterator[tuple[Any, Any]]:
        """Of every layer of a group, the page of a block, and what it must hold."""
        if table[index] != NULL_BLOCK:
            named = bytes(request.block_hashes[index])
            specs = layer_specs(group.kv_cache_spec)
            for name, spec in zip(group.layer_names, specs, strict=True):
                page = rank.cache.pages[name][table[index]]
                yield page, content(spec, named, name, self._weights, rank.number)


def configured(
    model: str,
    kind: Kind,
    blocks: int,
    settings: dict[str, Any],
    *,
    ranks: int,
    longest: int,
    step_tokens: int,
) -> VllmConfig:
    """vLLM's configuration, as its command line makes it."""
    block_tokens = kind.specs[0].block_size
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        hf_overrides={"max_position_embeddings": longest},
        max_model_len=longest,
        max_num_seqs=8,
        max_num_batched_tokens=step_tokens,
        block_size=block_tokens,
        tensor_parallel_size=ranks,
        async_scheduling=False,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvrouter_store.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        ),
    ).create_engine_config()
    cache = config.cache_config
    cache.kv_cache_layout, cache.num_gpu_blocks = kind.layout, blocks
    cache.mamba_cache_mode, cache.mamba_block_size = "align", block_tokens
    return config


def sampled(scheduler: Any, request_ids: list[str], told: KVConnectorOutput) -> ModelRunnerOutput:
    """One token for each request whose tokens are all computed."""
    known = [scheduler.requests[request_id] for request_id in request_ids]
    tokens = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in known]
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: at for at, request_id in enumerate(request_ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=None,
        kv_connector_output=told,
    )
