"""The connector that a vLLM engine loads: `kvrouter_store.connectors.vllm`, class KVStoreConnector.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvrouter_store.connectors.vllm",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"url": "kv://127.0.0.1:7400"}}'

It only translates vLLM's v1 connector interface (vllm/distributed/kv_transfer/kv_connector/v1/
base.py) to the two sides: `SchedulerSide` in the engine core, `WorkerSide` in each worker.
"""

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvrouter_store.connectors.landings import Landings
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.arrivals import Arrivals
from kvrouter_store.connectors.vllm.identity import EngineIdentity, identify, sharing_refusal
from kvrouter_store.connectors.vllm.plan import StepPlan
from kvrouter_store.connectors.vllm.scheduler import SchedulerSide
from kvrouter_store.connectors.vllm.settings import check_start, required_facts
from kvrouter_store.connectors.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from kvrouter_store.identity.block import Manifest

log = logging.getLogger("vllm.kvstore")


class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A StepPlan in the wrapper that vLLM carries from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Shares an engine's KV blocks through a kvstore server.

    Raises ConnectorRefused (one sentence, with the flag to set) where the engine cannot work so.
    Without a reachable store the engine starts and computes everything itself.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        settings = check_start(vllm_config, vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link: StoreLink | None = None
        self._landings: Landings | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config, kv_cache_config)
        else:
            self._worker = WorkerSide(get_tensor_model_parallel_rank(), self._open_link, log)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is owed: chunks are saved as they are computed, and a lost one is recomputed."""
        return False

    # Scheduler side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that the store can give; they are loaded asynchronously.

        None where they are on their way and none has come: vLLM asks again in its next step.
        """
        return self._planner.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember where the external tokens of the request go."""
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's loads and saves."""
        return PlanMetadata(self._planner.plan(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once (saves are done); the router gets the manifest's name."""
        return False, self._planner.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished; with several groups nothing was shared, so nothing is held."""
        return False, self._planner.finished(request)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the tensors that blocks are copied from and to (of a model whose KV is shared)."""
        if not sharing_refusal(self._vllm_config, self._kv_cache_config):
            self._copier.register(kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; they end between steps."""
        self._copier.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is computed only after its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do by layer: blocks are saved whole in wait_for_save."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completed."""
        self._copier.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads ended."""
        return None, self._copier.finished_loads() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those requests that must be recomputed."""
        return self._copier.failed_blocks()

    def shutdown(self) -> None:
        """End threads and connections, and with them what the store held for this engine."""
        if self._landings is not None:
            self._landings.close()
        if self._link is not None:
            self._link.close()
        if self._worker is not None:
            self._worker.shutdown()

    def _start_scheduler(self, vllm_config: Any, kv_cache_config: Any) -> None:
        facts = required_facts(vllm.__version__, models=True)
        identity = identify(vllm_config, kv_cache_config, self._settings, facts)
        manifest = identity.manifest
        if identity.refusal:
            log.warning("KV of this engine is not shared: %s", identity.refusal)
        else:
            log.info(
                "%s shares blocks of %d bytes in %d parts through %s: spec %s, manifest %s",
                *(identity.engine, manifest.block_bytes, len(manifest.parts), self._settings.url),
                *(manifest.spec.digest.hex()[:16], manifest.digest.hex()[:16]),
            )
        self._link = self._link_for(identity)
        self._link.start()
        self._landings = Landings(
            lambda: self._settings.waiter(f"{identity.engine}/landings"), manifest, log
        )
        arrivals = Arrivals(self._landings)
        self._scheduler = SchedulerSide(identity, self._settings.save, self._link, arrivals, log)

    def _link_for(self, identity: EngineIdentity) -> StoreLink:
        return StoreLink(
            self._settings.client(identity.engine),
            identity.manifest,
            log,
            engine=identity.engine,
            refusal=identity.refusal,
        )

    def _open_link(self, manifest: "Manifest") -> StoreLink:
        rank = get_tensor_model_parallel_rank()
        name = f"{self._settings.name or 'vllm'}/rank{rank}"
        link = StoreLink(self._settings.client(name, rank), manifest, log, engine=name)
        link.start()
        return link

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata.plan

    @property
    def _planner(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("vLLM called a scheduler method of a worker's connector")
        return self._scheduler

    @property
    def _copier(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("vLLM called a worker method of the scheduler's connector")
        return self._worker
