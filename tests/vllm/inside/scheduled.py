"""An engine without a model: vLLM's scheduler and the connector, over cache groups made by hand.

The groups may be of kinds that no CPU backend computes. A forward pass first compares every byte
that attention would read, then writes what the step computes: of each block a pattern that its
hash, its layer and the weights determine.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
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
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvrouter_store.connectors.vllm import KVStoreConnector

BLOCK = 64  # tokens
LAYERS = 2  # of each group
STEP_TOKENS = 256
HASH = sha256_cbor
NULL_BLOCK = 0

init_none_hash(HASH)


def latent() -> MLAAttentionSpec:
    """DeepSeek's latents, in the layout of their fp8 kernels."""
    return MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )


PAGE = latent().page_size_bytes


HEADS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
    "page_size_padded": PAGE,
}
"""Keys and values of two heads, in pages as large as the latents'."""


def full() -> FullAttentionSpec:
    """Attention to all tokens."""
    return FullAttentionSpec(**HEADS)


def window(tokens: int) -> SlidingWindowSpec:
    """Attention to the last tokens."""
    return SlidingWindowSpec(**HEADS, sliding_window=tokens)


def state() -> MambaSpec:
    """A recurrent state, kept where a step ends at the end of a block."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((4, 64), (2, 32, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PAGE,
        mamba_cache_mode="align",
    )


def sparse() -> UniformTypeKVCacheSpecs:
    """DeepSeek's sparse attention: latents, and smaller pages of their index."""
    index = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"layers.0.0": latent(), "layers.0.1": index}
    )


@dataclass(frozen=True)
class Kind:
    """Cache groups, and how vLLM orders their layers. Several groups overlay each other."""

    specs: tuple[Any, ...]
    layout: str = "LBHNC"
    draft: tuple[int, ...] = ()  # groups with layers of a draft model


KINDS = {
    "latents": Kind((latent(),)),
    "sparse": Kind((sparse(),)),
    "latents, window, state": Kind((latent(), window(128), state())),
    "two windows": Kind((full(), window(128), window(320))),
    "packed": Kind((latent(), window(128)), layout="BLHNC"),
    "draft": Kind((latent(),), draft=(0,)),
    "draft, window": Kind((latent(), window(128)), draft=(0,)),
}


class Engine:
    """One engine. Its owner must close it."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        blocks: int,
        settings: dict[str, Any],
        *,
        scheduler_first: bool = False,
    ) -> None:
        self.config = configured(model, kind, blocks, settings)
        self.cache, self._views, self._pages = cached(kind, blocks)
        tokens = resolve_kv_cache_block_sizes(self.cache, self.config)
        self._scheduler_tokens, self.cache.hash_block_size = tokens
        self.worker: KVStoreConnector
        self.scheduler: Scheduler
        begin = [self._begin_worker, self._begin_scheduler]  # vLLM's order
        for each in reversed(begin) if scheduler_first else begin:
            each()
        self.connector: Any = self.scheduler.connector
        self._hasher = get_request_block_hasher(self.cache.hash_block_size, HASH)
        self._numbers = count()
        self._weights = 0  # how often they were renewed
        self.computed = 0  # tokens
        self.compared = 0  # blocks
        self.loaded: Counter[int] = Counter()  # blocks by group

    def _begin_worker(self) -> None:
        self.worker = KVStoreConnector(self.config, KVConnectorRole.WORKER, self.cache)
        with set_current_vllm_config(self.config):
            self.worker.register_kv_caches(self._views)

    def _begin_scheduler(self) -> None:
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=generate_scheduler_kv_cache_config([self.cache]),
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
    ) -> str:
        """Add a request; its id. `coming`: so many blocks will land within so many seconds."""
        about = {"coming_blocks": coming[0], "wait_s": coming[1]} if coming else {}
        params = {"kv_transfer_params": {"kvstore": about}}
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

    def step(self) -> None:
        """One step of the engine core."""
        scheduler, worker = self.scheduler, self.worker
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        for request_id, tokens in scheduled.items():
            self._compute(scheduler.requests[request_id], tokens)
        for job in output.kv_connector_metadata.load_jobs.values():
            self.loaded.update(dict(enumerate(job.dst_spec.group_sizes)))
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        scheduler.update_from_output(output, sampled(scheduler, list(scheduled), told))

    def leaks(self) -> dict[str, int]:
        """What an idle engine still holds; empty if nothing."""
        pool = self.scheduler.kv_cache_manager.block_pool
        manager = self.connector.scheduler.manager
        chunks = manager.primary_tier._policy.chunks.values()
        found = {
            "blocks": self.cache.num_blocks - 1 - pool.get_num_free_blocks(),
            "jobs": len(manager._transfer_jobs),
            "chunks": sum(each.ref_cnt != 0 for each in chunks),
            "requests": len(self.connector.scheduler._req_status),
        }
        return {name: number for name, number in found.items() if number}

    def close(self) -> None:
        """End threads, connections and memory."""
        self.worker.shutdown()
        self.connector.shutdown()

    # The forward pass.

    def _compute(self, request: Any, tokens: int) -> None:
        """Compare what the step reads, and write what it computes."""
        begin = request.num_computed_tokens - tokens  # schedule() has counted them already
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for number, group in enumerate(self.cache.kv_cache_groups):
            for index in read(group.kv_cache_spec, begin):
                where = request.request_id, number, index, tables[number][index]
                assert tables[number][index] != NULL_BLOCK, where
                for page, expected in self._blocks(request, group, index, tables[number]):
                    assert torch.equal(page, expected), where
                self.compared += 1
        for number, group in enumerate(self.cache.kv_cache_groups):
            for index in written(group.kv_cache_spec, begin, begin + tokens):
                if index < min(len(tables[number]), len(request.block_hashes)):
                    for page, computed in self._blocks(request, group, index, tables[number]):
                        page[:] = computed
        self.computed += tokens

    def _blocks(
        self, request: Any, group: Any, index: int, table: Sequence[int]
    ) -> Iterator[tuple[Any, Any]]:
        """Of every layer of a group, the page of a block, and what it must hold."""
        if table[index] != NULL_BLOCK:
            for name in group.layer_names:
                page = self._pages[name][table[index]]
                computed = pattern(bytes(request.block_hashes[index]), name, self._weights)
                yield page, computed[: len(page)]


def configured(model: str, kind: Kind, blocks: int, settings: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration, as its command line makes it."""
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK,
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
    cache.mamba_cache_mode, cache.mamba_block_size = "align", BLOCK
    return config


def cached(kind: Kind, blocks: int) -> tuple[KVCacheConfig, dict[str, Any], dict[str, Any]]:
    """The cache of an engine; of each layer the view that vLLM makes, and pages without padding."""
    groups, tensors, views, pages = [], [], {}, {}
    block_bytes = sum(each.page_size_bytes for each in layer_specs(kind.specs[0]))
    raw = torch.zeros(block_bytes * blocks, dtype=torch.int8)
    layout, packed = KVCacheLayout[kind.layout], kind.layout == "BLHNC"
    for number, spec in enumerate(kind.specs):
        names = [f"layers.{number}.{layer}" for layer in range(LAYERS)]
        groups.append(KVCacheGroupSpec(names, spec, is_eagle_group=number in kind.draft))
        offset = 0
        for name, each in zip(names, layer_specs(spec), strict=True):
            page_bytes = each.page_size_bytes
            tensor = KVCacheTensor(
                size=len(raw),
                layers=[name],
                layer_stride=page_bytes * (1 if packed else blocks),
                block_stride=block_bytes if packed else page_bytes,
                offset=offset,
            )
            tensors.append(tensor)
            (views[name],) = create_kv_cache_views(raw, each, blocks, layout, tensor)
            shape = blocks, content_bytes(each)
            pages[name] = raw.as_strided(shape, (tensor.block_stride, 1), offset)
            offset += tensor.layer_stride
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout=kind.layout,
    )
    return config, views, pages


def layer_specs(spec: Any) -> list[Any]:
    """The spec of each layer of a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * LAYERS


def content_bytes(spec: Any) -> int:
    """Bytes of a page without its padding."""
    if isinstance(spec, MambaSpec):
        return int(spec.state_content_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def read(spec: Any, begin: int) -> range:
    """Whole blocks that a step from token `begin` on reads."""
    whole = begin // BLOCK
    if isinstance(spec, MambaSpec):  # within a block, the state is in the running one
        return range(whole - 1, whole) if begin and begin % BLOCK == 0 else range(0)
    if isinstance(spec, SlidingWindowSpec):
        return range(max(0, begin - spec.sliding_window + 1) // BLOCK, whole)
    return range(whole)


def written(spec: Any, begin: int, end: int) -> range:
    """Blocks that are whole after a step over these tokens, and were not before."""
    if isinstance(spec, MambaSpec):  # its state is where the step ends
        return range(end // BLOCK - 1, end // BLOCK) if end % BLOCK == 0 else range(0)
    return range(begin // BLOCK, end // BLOCK)


@lru_cache(maxsize=4096)
def pattern(block_hash: bytes, layer: str, weights: int) -> Any:
    """The bytes of a page of a layer."""
    seed = sha256(block_hash + f"{layer} {weights}".encode()).digest()
    return torch.frombuffer(bytearray(seed * (PAGE // len(seed) + 1)), dtype=torch.int8)


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
