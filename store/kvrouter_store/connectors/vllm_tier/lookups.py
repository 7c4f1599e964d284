"""Which chunks the store has, asked for in a thread that vLLM makes."""

import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase

from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.identity.chain import HASH_BYTES


@dataclass
class _Asked:
    """Kept by vLLM with a request: the last chunk that was asked for; None: nothing was."""

    last: OffloadKey | None = None


class ChunkLookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's manager of lookups over the store: one question for each cache group of a request."""

    def __init__(
        self, tier_type: str, links: Mapping[int, StoreLink], news: threading.Event
    ) -> None:
        self._links = links
        super().__init__(tier_type)  # starts the thread
        self._pending_results = _Answers(news)

    @property
    def asking(self) -> bool:
        """Whether the store has been asked for chunks and has not answered."""
        return any(state.phase is LookupPhase.IN_FLIGHT for state in self._lookup_state.values())

    def asks(self, keys: Iterable[OffloadKey], context: Any) -> bool:
        """Ask for the chunks of a request, once; whether it has no answer yet.

        It comes for all of them together. VLLM's scheduler would look up each of them instead, in
        every step until then.
        """
        asked = context.get_state(_Asked)
        if asked is None:
            asked = _Asked()
            for asked.last in keys:
                self.lookup(asked.last, context)
            context.set_state(asked)
        return asked.last is not None and self.lookup(asked.last, context) is None

    def batch_lookup(self, keys: list[OffloadKey], req_context: Any) -> Iterable[bool]:
        """For each key whether the chunk is there; none is where the store is away.

        VLLM's weak hashes are shorter than the store's names: it has no such chunk.
        """
        found: list[bool] = []
        for group, members in groupby(keys, get_offload_group_idx):
            names = [get_offload_block_hash(key) for key in members]
            if all(len(name) == HASH_BYTES for name in names):
                found += self._links[group].held(b"".join(names))
            else:
                found += [False] * len(names)
        return found


class _Answers:
    """The queue of answered batches; sets an event whenever there is one more."""

    def __init__(self, news: threading.Event) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._news = news
        self.get_nowait = self._queue.get_nowait

    def put(self, batch: Any) -> None:
        """Add a batch."""
        self._queue.put(batch)
        self._news.set()
