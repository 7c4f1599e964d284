"""VLLM's manager of its host memory over a table that takes runs: class HostChunks.

VLLM's own (vllm/v1/kv_offload/cpu/manager.py) takes 10 us of the scheduler's thread for each chunk
that is stored and passed on: 20 ms for a prompt of 32,000 tokens, while every stream waits.
"""

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from kvrouter_store.connectors.vllm.chunk_table import ChunkTable
from kvrouter_store.connectors.vllm.room import Chunk
from kvrouter_store.connectors.vllm_tier.runs import InOrder

FOUND = {Chunk.ABSENT: LookupResult.MISS, Chunk.COMING: LookupResult.HIT_PENDING}


class HostChunks(OffloadingManager):  # type: ignore[misc]
    """Says what CPUPrimaryTierOffloadingManager says. Owns it, for its memory and its figures."""

    def __init__(self, memory: CPUPrimaryTierOffloadingManager) -> None:
        self._memory = memory
        self._num_chunks = memory._num_chunks  # which vLLM's tiers read
        self.table = ChunkTable(memory._num_chunks)
        self.prepare_read = self.prepare_load
        self.prepare_write, self.complete_write = self.prepare_store, self.complete_store

    def config_info(self) -> Any:
        """As vLLM's, since 0.33."""
        return self._memory.config_info()

    def get_kv_memoryview(self) -> memoryview:
        """The memory, by chunks."""
        view: memoryview = self._memory.get_kv_memoryview()
        return view

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Each chunk is offered when it is complete."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the chunk is here."""
        return FOUND.get(self.table.state(key), LookupResult.HIT)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """As vLLM's."""
        return self._memory.get_load_source(key, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Where chunks are, that stay until `complete_load`."""
        return CPULoadStoreSpec(self.table.hold(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """They were read."""
        self.table.let_go(_from_the_end(keys, req_context))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Where those that are not here are to be written; None if there is no room."""
        taken = self.table.take(keys)
        if taken is None:
            return None
        if taken.keys:
            self._memory.allocation_sizes_in_current_batch.append(len(taken.keys))
        self._note(taken.evicted, removed=True)
        numbers = CPULoadStoreSpec(taken.numbers)
        return PrepareStoreOutput(InOrder(taken.keys), numbers, taken.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """They were written, or were not."""
        came = self.table.came(keys, good=success)
        if success:
            self._note(came, removed=False)

    def pass_on(self, keys: InOrder) -> list[int]:
        """They were written, and stay until `complete_read`; their numbers."""
        self._note(keys, removed=False)
        return self.table.pass_on(keys)

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """They are in the store."""
        self.table.let_go(_from_the_end(keys, req_context))

    def reset_cache(self) -> None:
        """As vLLM's."""
        self.table.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """As vLLM's."""
        yield from self._memory.take_events()

    def get_stats(self) -> Any:
        """As vLLM's, from its own figures."""
        memory, table = self._memory, self.table
        memory._num_allocated_chunks = memory._num_chunks
        memory._free_list = ()
        memory._num_evictable_cache_chunks = table.free
        memory._num_write_pending_chunks = table.coming
        return memory.get_stats()

    def shutdown(self) -> None:
        """End the map of the memory."""
        self._memory.shutdown()

    def _note(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._memory.events is not None:
            event = OffloadingEvent(keys=keys, medium=self._memory.medium, removed=removed)
            self._memory.events.append(event)


def _from_the_end(keys: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey]:
    """Keys of a request, those of its last tokens first."""
    if isinstance(keys, InOrder):
        return keys[::-1]
    return sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0, reverse=True)
