"""What an engine needs to start with the connector, and what vLLM's offloading is told then.

Knows vLLM's configuration only. A refusal at start is one sentence with the flag to set.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvrouter_store.connectors.settings import ConnectorRefused, ConnectorSettings
from kvrouter_store.connectors.vllm.host_memory import (
    Host,
    agreed,
    kv_bytes,
    size_beside_store,
    size_for,
)
from kvrouter_store.connectors.vllm.versions import HASH_ALGO, TESTED, ran_of
from kvrouter_store.errors import KVStoreError


@dataclass(frozen=True)
class EngineSettings(ConnectorSettings):
    """What `kv_connector_extra_config` may hold: the settings of `ConnectorSettings`, and these.

    cpu_bytes_to_use: host memory through which KV passes between the engine and the store, for all
        ranks together; what was used last stays in it. Left out (0): see `host_bytes`.
    threads: that copy between this memory and the store. Left out (0): by the number of cores.
    canonical_layout: a block is stored as one rank would hold it, so that engines with other
        numbers of tensor-parallel ranks share. Of models with states they do not.
    allow_untested: start with a newer series of vLLM than was tested, after a self-test.
    """

    cpu_bytes_to_use: int = 0
    threads: int = 0
    canonical_layout: bool = False
    allow_untested: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any], kv_role: str) -> Self:
        """The settings in `extra`. Raises ConnectorRefused on an unknown key or a bad value."""
        if extra.get("parts"):
            raise cls.refused(
                '"parts" is not a setting here; set "canonical_layout": true to share with engines '
                "of other numbers of ranks"
            )
        settings = super().parse(extra, kv_role)
        for name, least in (("cpu_bytes_to_use", 0), ("threads", 1)):
            if extra.get(name, least) < least:
                raise cls.refused(f'"{name}" must be at least {least}')
        return settings

    @property
    def maps(self) -> bool:
        """Whether the memory of a store on this host may be mapped."""
        return self.transport in {"auto", "shm"}

    def as_offloading(
        self, extra: Mapping[str, Any], host_bytes: int, identity: Any
    ) -> dict[str, Any]:
        """What vLLM's offloading reads in the place of `extra`."""
        ours = {"cpu_bytes_to_use", "canonical_layout", "allow_untested", "parts"}
        store = {key: value for key, value in extra.items() if key not in ours}
        return {
            "spec_name": "StoreOffloadingSpec",
            "spec_module_path": "kvrouter_store.connectors.vllm.spec",
            "cpu_bytes_to_use": host_bytes,
            "canonical_layout": self.canonical_layout,
            "offload_prompt_only": self.save == "prompt",
            "self_test": self.allow_untested,
            "pool": self if self.maps else None,
            "secondary_tiers": [
                {
                    **store,
                    "type": "KVStoreTier",
                    "module_path": "kvrouter_store.connectors.vllm_tier",
                    "identity": identity,
                    "pinned": True,
                }
            ],
        }


def check_start(vllm_config: Any, kv_cache_config: Any, version: str) -> EngineSettings:
    """The settings of an engine that may start. Raises ConnectorRefused, with the flag to set."""
    transfer = vllm_config.kv_transfer_config
    settings = EngineSettings.parse(transfer.kv_connector_extra_config, transfer.kv_role)
    check_version(version, allow_untested=settings.allow_untested)
    for complaint in _complaints(vllm_config, kv_cache_config):
        raise ConnectorRefused(f"KVStoreConnector cannot work so: {complaint}")
    needed, there = host_bytes(settings, vllm_config, kv_cache_config), _shared_memory_bytes()
    if there < needed:
        raise settings.refused(
            f'"cpu_bytes_to_use" is {needed}, and /dev/shm has {there} bytes; set it lower, or '
            "start the container with a larger --shm-size"
        )
    return replace(settings, cpu_bytes_to_use=needed)


def host_bytes(settings: EngineSettings, vllm_config: Any, kv_cache_config: Any) -> int:
    """Host memory for KV on its way: what the settings say, or by what the host has.

    The same in all processes of an engine. It is small where no load passes through it: with a
    store on this host.
    """
    if settings.cpu_bytes_to_use:
        return settings.cpu_bytes_to_use
    ranks = vllm_config.parallel_config.world_size

    def find() -> int:
        if settings.maps and _is_here(settings):
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            step = kv_bytes(vllm_config, kv_cache_config, tokens)
            return size_beside_store(step, ranks, Host.here())
        tokens = vllm_config.model_config.max_model_len
        return size_for(kv_bytes(vllm_config, kv_cache_config, tokens), ranks, Host.here())

    return agreed(vllm_config.kv_transfer_config.engine_id, find)


def _is_here(settings: EngineSettings) -> bool:
    """Whether this process can map the store's memory: then loads need none beside it."""
    with settings.client("vllm/start") as client:
        try:
            client.stats()
        except KVStoreError:
            return False
        return any(channel.directory is not None for channel in client.channels())


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raise ConnectorRefused where a version of vLLM was not tested, and is not to be tried."""
    ran = ran_of(version)
    if ran is not None and (allow_untested or ran != "nothing"):
        return
    remedy = ", or a newer kvrouter"
    if ran is not None:
        remedy += '; or set "allow_untested": true in kv_connector_extra_config to try it'
    raise ConnectorRefused(
        f"KVStoreConnector was not tested with vLLM {version}: install a vLLM of series "
        f"{', '.join(TESTED)}{remedy}"
    )


def _complaints(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Why blocks have no names that others share, or equal tokens other bytes; the flag to set."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        yield "blocks have no names without prefix caching; set --enable-prefix-caching"
    if cache.prefix_caching_hash_algo != HASH_ALGO:
        yield (
            f"block hashes are {cache.prefix_caching_hash_algo!r}, which only vLLM computes; "
            f"set --prefix-caching-hash-algo {HASH_ALGO}"
        )
    if parallel.pipeline_parallel_size != 1:
        yield "a rank must hold all layers; set --pipeline-parallel-size 1"
    if parallel.decode_context_parallel_size != 1:
        yield "a rank must hold all tokens; set --decode-context-parallel-size 1"
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        yield (
            "the KV of a draft model of its own has no identity that engines could compare; leave "
            "--speculative-config out"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        yield "KV depends on what follows it; leave --kv-transfer-config out"
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
        yield "states must lie at the ends of blocks; set --mamba-cache-mode align"


def _shared_memory_bytes() -> int:
    """What the file system holds in which vLLM keeps its host memory, when it is empty."""
    found = os.statvfs("/dev/shm")
    return found.f_blocks * found.f_frsize
