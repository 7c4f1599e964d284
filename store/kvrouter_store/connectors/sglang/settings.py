"""What `--hicache-storage-backend-extra-config` may hold beside SGLang's own keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvrouter_store.connectors.settings import LinkSettings

BY_ADDRESS = "interface_v1"
SGLANGS_OWN = {
    *("backend_name", "module_path", "class_name", BY_ADDRESS),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    "hicache_storage_pass_prefix_keys",
}
"""What SGLang reads of the same object and may leave in it.

Its cache takes the last four out (mem_cache/hybrid_cache/hybrid_cache_controller.py), its decode
engines that offload KV leave them in (disaggregation/decode_kvcache_offload_manager.py).
"""


@dataclass(frozen=True)
class HiCacheSettings(LinkSettings):
    """The settings of `LinkSettings`, and one more.

    update_group: as of `ConnectorSettings`.
    """

    update_group: str = ""

    PLACE: ClassVar[str] = "--hicache-storage-backend-extra-config"

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """The store's settings in `extra`. Raises ConnectorRefused on an unknown key or value."""
        return cls.of({key: value for key, value in extra.items() if key not in SGLANGS_OWN})


def moves_by_address(extra: Mapping[str, Any]) -> bool:
    """Whether SGLang will say where pages lie (interface v1), and not pass copies of them."""
    return bool(extra.get(BY_ADDRESS, 0))
