"""Chunks that a router announced: in another node of the store, or on their way, and awaited.

A router that sends a decode leg before the KV of its prompt has landed says in `kv_transfer_params`
how many leading blocks will land. vLLM asks for the chunks of a waiting request in each of its
steps. One that is on its way gets no answer until it has landed: vLLM then fetches it while the
prefill engine computes the next, and gives the request no blocks of its cache before all came.

A router also names the node that has them, where it is not the engine's own. Then that node is
asked for what the own one lacks, whatever blocks a hint lists: each is checked against its digest.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from kvrouter_store.connectors.landings import AwaitedPrefix, Landings
from kvrouter_store.connectors.neighbours import Sources
from kvrouter_store.connectors.vllm_tier.announced import Announced, announced
from kvrouter_store.identity.block import Manifest

log = logging.getLogger("vllm.kvstore")


@dataclass
class _Coming:
    """Kept by vLLM with a request: what is on its way to it.

    end: token at which the last announced block ends; None where all chunks are asked for.
    until: when the wait is over. node: where they are; '' is the own one.
    asked: chunks that nobody follows yet, with group and position. places: where each followed
    chunk is in what is awaited; None for one that came, and was lost. seen: what had landed when
    vLLM last asked.
    """

    end: int | None
    until: float
    node: str
    asked: list[tuple[int, int, OffloadKey]] = field(default_factory=list)
    awaited: list[AwaitedPrefix] = field(default_factory=list)
    places: dict[OffloadKey, tuple[AwaitedPrefix, int] | None] = field(default_factory=dict)
    seen: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(eq=False)
class Arrivals:
    """What is on its way to one engine; called by the scheduler's thread alone.

    block_tokens: of the blocks that routers count. manifest_of: the manifest of a cache group.
    sources: nodes that a request may name.
    """

    landings: Landings
    block_tokens: int
    manifest_of: Callable[[int], Manifest]
    sources: Sources
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._reach_tokens: Mapping[int, int | None] = {}
        self._asked: list[_Coming] = []  # those with chunks that nobody follows yet
        self._followed: list[AwaitedPrefix] = []
        self._complained = False

    def await_groups(self, reach_tokens: Mapping[int, int | None]) -> None:
        """Of these cache groups chunks are awaited: the last so many tokens, or (None) all."""
        self._reach_tokens = reach_tokens

    def begin(self, context: ReqContext) -> None:
        """A request came: note what was announced to it."""
        told = announced(context.kv_transfer_params, _plain(context.kv_hints))
        if told is None:
            return
        context.set_state(told)
        node = self.sources.url(told.source) if told.source else ""
        if node is None and not self._complained:
            self._complained = True
            log.warning('%.200r is not among "neighbours": nothing is read from it', told.source)
        end = None if told.blocks is None else told.blocks * self.block_tokens
        if node or (node == "" and end is not None):
            context.set_state(_Coming(end, self.clock() + told.wait_s, node))

    def lookup(self, key: OffloadKey, context: ReqContext) -> bool | None:
        """Whether a chunk has landed that was not there; None: it may yet."""
        coming = context.get_state(_Coming)
        if coming is None:
            return False
        if key in coming.places:
            place = coming.places[key]
            return False if place is None else place[0].came(place[1])
        group, position = get_offload_group_idx(key), context.get_offload_key_position(key)
        if position is None or not self._is_announced(group, position, coming):
            return False
        if not coming.asked:
            self._asked.append(coming)
        coming.asked.append((group, position, key))
        return None

    def elsewhere(self, context: ReqContext) -> bool:
        """Whether a router named another node for the request."""
        coming = context.get_state(_Coming)
        return coming is not None and bool(coming.node)

    def node_of(self, key: OffloadKey, context: ReqContext) -> str:
        """The node that has a chunk that was found; '' is the own one."""
        coming = context.get_state(_Coming)
        place = None if coming is None else coming.places.get(key)
        return coming.node if coming and place and place[0].came(place[1]) else ""

    def fetched(self, context: ReqContext) -> dict[str, int] | None:
        """What became of a hint to fetch: blocks that it named, that were asked for, that came.

        None: the request had none.
        """
        told, coming = context.get_state(Announced), context.get_state(_Coming)
        if told is None or not told.hinted:
            return None
        places = [] if coming is None else [*coming.places.values()]
        came = sum(place is not None and place[0].came(place[1]) is True for place in places)
        return {"requested": told.hinted, "accepted": len(places), "honoured": came}

    def follow(self) -> None:
        """Begin to follow what was asked for since the last call."""
        for coming in self._asked:
            self._follow(coming)
        self._asked.clear()
        self._followed = [each for each in self._followed if not each.over]

    def unchanged(self, context: ReqContext) -> bool:
        """Whether a request waits, and nothing came since this was asked last."""
        coming = context.get_state(_Coming)
        if coming is None or all(each.over for each in coming.awaited):
            return False
        before, coming.seen = coming.seen, [(each.landed, each.over) for each in coming.awaited]
        return bool(coming.seen == before)

    def awaits(self, context: ReqContext) -> bool:
        """Whether chunks of the request have yet to land."""
        coming = context.get_state(_Coming)
        return coming is not None and (
            bool(coming.asked) or any(not each.over for each in coming.awaited)
        )

    def lose(self, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        """Chunks that came cannot be loaded: they are awaited no longer."""
        if (coming := context.get_state(_Coming)) is not None:
            coming.places.update(dict.fromkeys(keys))
            coming.seen.clear()  # this is news, too

    def forget(self, context: ReqContext) -> None:
        """The request waits no longer: it begins with what came, or has ended."""
        if (coming := context.get_state(_Coming)) is not None:
            coming.asked.clear()
            for each in coming.awaited:
                each.drop()

    @property
    def waiting(self) -> bool:
        """Whether anything is awaited."""
        return bool(self._asked) or any(not each.over for each in self._followed)

    def _is_announced(self, group: int, position: int, coming: _Coming) -> bool:
        if coming.end is None:
            return True
        if position > coming.end or group not in self._reach_tokens:
            return False
        reach = self._reach_tokens[group]
        return reach is None or position > coming.end - reach

    def _follow(self, coming: _Coming) -> None:
        asked = sorted(set(coming.asked))  # a window's chunks are asked for from the end
        coming.asked.clear()
        for group, members in groupby(asked, itemgetter(0)):
            keys = [key for _, _, key in members]
            hashes = b"".join(map(get_offload_block_hash, keys))
            left_s = coming.until - self.clock()
            manifest = self.manifest_of(group)
            awaited = self.landings.follow(manifest, hashes, left_s, coming.node)
            coming.awaited.append(awaited)
            self._followed.append(awaited)
            coming.places.update({key: (awaited, place) for place, key in enumerate(keys)})


def _plain(hints: KvHintsEnvelope | None) -> dict[str, Any] | None:
    """What is read of an envelope, as it is in JSON."""
    if hints is None:
        return None
    names = ("action_type", "action_version", "payload")
    actions = [{name: getattr(action, name) for name in names} for action in hints.actions]
    return {"actions": actions}
