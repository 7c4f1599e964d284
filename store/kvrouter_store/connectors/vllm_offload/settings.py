"""The connector's settings, what vLLM's offloading is told of them, and why it refuses to start.

Knows vLLM's configuration only. A refusal at start is one sentence with the flag to set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvrouter_store.connectors.vllm.settings import (
    ConnectorSettings,
    naming_complaints,
    refuse_any,
    refused,
)
from kvrouter_store.connectors.vllm.versions import VllmFacts

HOST_BYTES: Final = 4 << 30
THREADS: Final = 4


@dataclass(frozen=True)
class OffloadSettings(ConnectorSettings):
    """What `kv_connector_extra_config` may hold: the settings of `ConnectorSettings`, and these.

    cpu_bytes_to_use: host memory through which KV passes between the engine and the store, for all
        ranks together; vLLM keeps in it what was used last.
    threads: that copy between this memory and the store.
    canonical_layout: a block is stored as one rank would hold it, so that engines with other
        numbers of tensor-parallel ranks share. Of models with states they do not.
    """

    cpu_bytes_to_use: int = HOST_BYTES
    threads: int = THREADS
    canonical_layout: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any], kv_role: str) -> Self:
        """The settings in `extra`. Raises ConnectorRefused on an unknown key or a bad value."""
        if extra.get("parts"):
            raise refused(
                '"parts" is not a setting here; set "canonical_layout": true to share with engines '
                "of other numbers of ranks"
            )
        settings = super().parse(extra, kv_role)
        for name in ("cpu_bytes_to_use", "threads"):
            if getattr(settings, name) < 1:
                raise refused(f'"{name}" must be at least 1')
        return settings

    def as_offloading(self, extra: Mapping[str, Any], identity: Any) -> dict[str, Any]:
        """What vLLM's offloading reads in the place of `extra`."""
        ours = {"cpu_bytes_to_use", "canonical_layout", "parts"}
        store = {key: value for key, value in extra.items() if key not in ours}
        return {
            "spec_name": "StoreOffloadingSpec",
            "spec_module_path": "kvrouter_store.connectors.vllm_offload.spec",
            "cpu_bytes_to_use": self.cpu_bytes_to_use,
            "canonical_layout": self.canonical_layout,
            "offload_prompt_only": self.save == "prompt",
            "secondary_tiers": [
                {
                    **store,
                    "type": "KVStoreTier",
                    "module_path": "kvrouter_store.connectors.vllm_tier",
                    "identity": identity,
                }
            ],
        }


def check_start(vllm_config: Any, kv_cache_config: Any, facts: VllmFacts) -> OffloadSettings:
    """The settings of an engine that may start. Raises ConnectorRefused, with the flag to set."""
    transfer = vllm_config.kv_transfer_config
    settings = OffloadSettings.parse(transfer.kv_connector_extra_config, transfer.kv_role)
    refuse_any(naming_complaints(vllm_config, facts) + _sharing_complaints(vllm_config))
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
        refuse_any(["states must lie at the ends of blocks; set --mamba-cache-mode align"])
    return settings


def _sharing_complaints(vllm_config: Any) -> list[str]:
    """Why equal tokens would have KV of different bytes, each with the flag to set."""
    found = []
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        found.append(
            "the KV of a draft model of its own has no identity that engines could compare; leave "
            "--speculative-config out"
        )
    return found
