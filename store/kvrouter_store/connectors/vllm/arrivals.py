"""Requests whose prefix is on its way: when they may take blocks, and what to load when.

The router announces the prefix in the decode leg's `kv_transfer_params`. A request waits without
blocks until some of it has landed. Then vLLM gives it all its blocks, and each piece is loaded as
it lands, while the prefill engine computes the next. Copies no KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvrouter_store.connectors.landings import AwaitedPrefix, Landings
from kvrouter_store.connectors.vllm.plan import LoadOrder
from kvrouter_store.identity.chain import HASH_BYTES

IDLE_WAIT_S = 0.005  # a step without tokens waits for news instead of spinning
MAX_WAIT_S = 86400.0


class Announced(NamedTuple):
    """A router's news: `blocks` leading blocks of the prompt land within `wait_s` seconds."""

    blocks: int
    wait_s: float


def announced(params: Any) -> Announced | None:
    """What `kv_transfer_params` announce; None where they announce nothing valid."""
    about = params.get("kvstore") if isinstance(params, dict) else None
    if not isinstance(about, dict):
        return None
    blocks, wait_s = about.get("coming_blocks"), about.get("wait_s")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks <= 0:
        return None
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s > 0:
        return None
    return Announced(blocks, min(float(wait_s), MAX_WAIT_S))


@dataclass(slots=True)
class _Taken:
    """A request that has its blocks: those from `loaded` on have not been ordered yet."""

    coming: AwaitedPrefix
    block_ids: tuple[int, ...]
    loaded: int


class Arrivals:
    """What is on its way to one engine; called by the scheduler's thread alone."""

    def __init__(self, landings: Landings) -> None:
        self._landings = landings
        self._awaited: dict[str, AwaitedPrefix] = {}
        self._taken: dict[str, _Taken] = {}
        self._ended: list[LoadOrder] = []

    def expect(self, request_id: str, hashes: bytes, held: int, wait_s: float) -> None:
        """The chain's blocks behind the first `held` are on their way: follow them."""
        if request_id not in self._awaited:
            self._awaited[request_id] = self._landings.follow(hashes, held, wait_s)

    def expects(self, request_id: str) -> bool:
        """Whether `expect` was called for this request."""
        return request_id in self._awaited

    def blocks(self, request_id: str) -> int | None:
        """Leading blocks to take: all, once one came; 0 if none will come; None: ask later."""
        coming = self._awaited[request_id]
        over = coming.over  # read first: news of earlier landings has come by then
        if coming.landed > coming.first and not (over and coming.landed < coming.blocks):
            return coming.blocks
        return 0 if over else None

    def take(self, request_id: str, block_ids: Sequence[int], first: int, end: int) -> bool:
        """The engine gave blocks `first` to `end` of the chain these ids; False: nothing comes."""
        coming = self._awaited.get(request_id)
        if coming is None or end > coming.blocks or coming.over:
            return False
        self._taken[request_id] = _Taken(coming, tuple(block_ids[:end]), first)
        return True

    def orders(self, *, idle: bool) -> list[LoadOrder]:
        """What can be loaded now; with `idle` (the engine has nothing to do) it may wait a little.

        The last order of a request names the blocks that will not come.
        """
        if idle and (self._taken or self._unsettled()) and not self._ended:
            self._landings.news(IDLE_WAIT_S)
        orders, self._ended = self._ended, []
        for request_id, taken in list(self._taken.items()):
            order = _next_order(request_id, taken)
            if order is not None:
                orders.append(order)
                if order.last:
                    del self._taken[request_id]
        return orders

    def forget(self, request_id: str) -> None:
        """The request ended: drop its wait, and end its load with the blocks that came."""
        coming = self._awaited.pop(request_id, None)
        if coming is not None:
            coming.drop()
        if self._taken.pop(request_id, None) is not None:
            self._ended.append(LoadOrder(request_id, b"", 0, ()))

    def _unsettled(self) -> bool:
        return any(not coming.over for coming in self._awaited.values())


def _next_order(request_id: str, taken: _Taken) -> LoadOrder | None:
    coming, first, end = taken.coming, taken.loaded, len(taken.block_ids)
    over = coming.over  # read first: news of earlier landings has come by then
    landed = max(first, min(coming.landed, end))
    last = over or landed == end
    if landed == first and not last:
        return None
    taken.loaded = landed
    hashes = coming.hashes[: landed * HASH_BYTES]
    lost = taken.block_ids[landed:] if last else ()
    return LoadOrder(request_id, hashes, first, taken.block_ids[first:landed], last=last, lost=lost)
