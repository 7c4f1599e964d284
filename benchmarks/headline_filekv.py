"""The simplest vLLM connector: one file for each KV block, with all layers. Only for headline.py.

It represents the connector that the old proxy was used with. It saves and loads within the step,
verifies nothing and removes nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks to load before this step and to save after it: (file name, block id)."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


class FileConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Blocks in files of one folder, named by vLLM's block hashes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.kv_connector_extra_config["folder"])
        self._block_tokens = vllm_config.cache_config.block_size
        self._saves = self._kv_transfer_config.is_kv_producer
        self._requests: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._orders = Orders()
        self._caches: list[Any] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens of the blocks whose files exist; they load within the step."""
        first = computed // self._block_tokens
        last = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        end = first
        while end < last and self._file(request.block_hashes[end].hex()).exists():
            end += 1
        self._local[request.request_id] = first
        return (end - first) * self._block_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """Order the loads."""
        self._requests[request.request_id] = request
        first = self._local.get(request.request_id, 0)
        ids = blocks.get_block_ids()[0]
        for index in range(first, first + external // self._block_tokens):
            self._orders.load.append((request.block_hashes[index].hex(), ids[index]))

    def build_connector_meta(self, output: Any) -> Orders:
        """Order the saves of the prompt blocks that this step completes."""
        orders, self._orders = self._orders, Orders()
        for request_id, tokens in output.num_scheduled_tokens.items() if self._saves else ():
            request = self._requests[request_id]
            computed = min(request.num_computed_tokens + tokens, request.num_prompt_tokens)
            end = min(computed // self._block_tokens, len(request.block_hashes))
            ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            for index in range(self._done.get(request_id, 0), end):
                orders.save.append((request.block_hashes[index].hex(), ids[index]))
            self._done[request_id] = end
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request."""
        for kept in (self._requests, self._local, self._done):
            kept.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the layers' tensors; block index outermost."""
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read this step's files into the cache."""
        for name, block in self._get_connector_metadata().load:
            data = torch.frombuffer(bytearray(self._file(name).read_bytes()), dtype=torch.uint8)
            offset = 0
            for cache in self._caches:
                target = cache[block].view(torch.uint8).view(-1)
                target.copy_(data[offset : offset + target.numel()])
                offset += target.numel()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are written as a whole."""

    def wait_for_save(self) -> None:
        """Write this step's blocks; a rename makes each file visible when it is complete."""
        for name, block in self._get_connector_metadata().save:
            path = self._file(name)
            if not path.exists():
                with path.with_suffix(".part").open("wb") as file:
                    for cache in self._caches:
                        file.write(cache[block].view(torch.uint8).numpy().data)
                path.with_suffix(".part").rename(path)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.kv"
