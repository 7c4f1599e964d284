"""The scheduler's side of the vLLM connector, in the engine core: what to load and save.

A request's blocks are named by vLLM's own block hashes. Blocks that may not be shared are neither
looked up nor saved. Copies no KV.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.arrivals import Arrivals, announced
from kvrouter_store.connectors.vllm.identity import EngineIdentity
from kvrouter_store.connectors.vllm.names import NameCheck, may_share
from kvrouter_store.connectors.vllm.plan import LoadOrder, SaveOrder, StepPlan
from kvrouter_store.connectors.vllm.settings import SaveScope


class EngineRequest(Protocol):
    """The part of vLLM's `Request` that is read."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    pooling_params: Any
    lora_request: Any
    mm_features: Sequence[Any]
    cache_salt: str | None
    resumable: bool
    kv_transfer_params: dict[str, Any] | None
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        ...


class StepOutput(Protocol):
    """The part of vLLM's `SchedulerOutput` that is read."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens to compute in this step, by request."""
        ...

    @property
    def kv_connector_block_state(self) -> Any:
        """Resolves a request's block ids by cache group."""
        ...


@dataclass(slots=True)
class _Tracked:
    """A request that the engine works on: where its local hit ended, how far it was saved.

    `loaded_in`: how often it had been preempted when its last load was ordered.
    """

    request: EngineRequest
    shared: bool
    local_blocks: int = 0
    saved_blocks: int = 0
    loaded_in: int = -1


class SchedulerSide:
    """Plans loads and saves of one engine; one instance per engine core, called by one thread."""

    def __init__(
        self,
        identity: EngineIdentity,
        save: SaveScope,
        link: StoreLink,
        arrivals: Arrivals,
        log: logging.Logger,
    ) -> None:
        self._identity = identity
        self._refusal = identity.refusal
        self._save = save
        self._link = link
        self._arrivals = arrivals
        self._names = NameCheck(identity.manifest.spec.root, identity.block_tokens, log)
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []

    def matched_tokens(
        self, request: EngineRequest, computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens after `computed_tokens` (whole blocks, held here) that the store can give.

        At least one token is left to compute: the engine samples from it. The second value: loading
        goes on between steps. A request whose load failed comes here again and is then computed:
        two links that see the store differently would load it for ever. None: blocks are on their
        way, and none has landed yet; the engine asks again in its next step.
        """
        tracked = self._track(request)
        block_tokens = self._identity.block_tokens
        tracked.local_blocks = computed_tokens // block_tokens
        upto = min(len(request.block_hashes), (request.num_tokens - 1) // block_tokens)
        if not tracked.shared or request.skip_reading_prefix_cache:
            return 0, False
        if upto <= tracked.local_blocks or tracked.loaded_in == request.num_preemptions:
            return 0, False
        blocks = self._found(request, tracked, upto)
        if blocks is None:
            return None, False
        tokens = max(0, blocks - tracked.local_blocks) * block_tokens
        return tokens, tokens > 0

    def allocated(
        self, request: EngineRequest, block_ids: Sequence[int], external_tokens: int
    ) -> None:
        """The engine gave the request its blocks: plan the load of those that are external.

        `block_ids` are all blocks of the request: local hits first, then the external ones.
        """
        tracked = self._track(request)
        if not external_tokens:
            return
        tracked.loaded_in = request.num_preemptions
        first = tracked.local_blocks
        end = first + external_tokens // self._identity.block_tokens
        if self._arrivals.take(request.request_id, block_ids, first, end):
            return
        self._loads.append(
            LoadOrder(
                request.request_id,
                b"".join(request.block_hashes[:end]),
                first,
                tuple(block_ids[first:end]),
            )
        )

    def plan(self, output: StepOutput) -> StepPlan:
        """The orders for this step's workers."""
        loads, self._loads = self._loads, []
        loads += self._arrivals.orders(idle=not output.num_scheduled_tokens and not loads)
        saves: list[SaveOrder] = []
        if self._save != "none":
            for request_id, tokens in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                order = self._save_order(tracked, tokens, output) if tracked is not None else None
                if order is not None:
                    saves.append(order)
        return StepPlan(
            self._identity.manifest.doc,
            self._identity.replicas,
            self._identity.rank_parts,
            loads,
            saves,
            idle=not output.num_scheduled_tokens,
        )

    def finished(self, request: EngineRequest) -> dict[str, Any]:
        """Forget the request; the `kv_transfer_params` about it for the router.

        They name no blocks while the store is away: the router would wait for them in vain.
        """
        tracked = self._tracked.pop(request.request_id, None)
        saved = tracked.saved_blocks if tracked is not None and not self._link.away else 0
        self._arrivals.forget(request.request_id)
        manifest = self._identity.manifest
        about: dict[str, Any] = {
            "manifest": manifest.digest.hex(),
            "blocks": saved,
            "block_tokens": self._identity.block_tokens,
            "root": manifest.spec.root,
            "waits": True,
        }
        if self._refusal:
            about["refusal"] = self._refusal
        return {"kvstore": about}

    def _found(self, request: EngineRequest, tracked: _Tracked, upto: int) -> int | None:
        """Leading blocks to load: those in the store, or all that are coming; None: ask later.

        Blocks that were on their way and do not come are computed.
        """
        request_id = request.request_id
        if tracked.loaded_in < 0 and self._arrivals.expects(request_id):
            coming = self._arrivals.blocks(request_id)
            if coming != 0:
                return coming
        held = self._link.match(b"".join(request.block_hashes[:upto]))
        announcement = announced(request.kv_transfer_params)
        if announcement is None or tracked.loaded_in >= 0 or self._arrivals.expects(request_id):
            return held
        end = min(upto, announcement.blocks)
        if max(held, tracked.local_blocks) >= end:
            return held
        hashes = b"".join(request.block_hashes[:end])
        self._arrivals.expect(request_id, hashes, held, announcement.wait_s)
        return None

    def _track(self, request: EngineRequest) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            shared = not self._refusal and may_share(request) and self._names.agree(request)
            self._refusal = self._refusal or self._names.refusal
            tracked = self._tracked[request.request_id] = _Tracked(request, shared)
        return tracked

    def _save_order(
        self, tracked: _Tracked, scheduled_tokens: int, output: StepOutput
    ) -> SaveOrder | None:
        """The blocks that are complete after this step and were not saved for this request yet.

        A block has a hash only once all its tokens are known, so a rejected draft token is never
        saved. Blocks of a local hit are offered again: the store may have lost them.
        """
        request = tracked.request
        if not tracked.shared:
            return None
        end_tokens = request.num_computed_tokens + scheduled_tokens
        if self._save == "prompt":
            end_tokens = min(end_tokens, request.num_prompt_tokens)
        end = min(end_tokens // self._identity.block_tokens, len(request.block_hashes))
        first = tracked.saved_blocks
        if end <= first:
            return None
        block_ids = output.kv_connector_block_state.get_block_ids(request.request_id)
        if block_ids is None:
            return None
        tracked.saved_blocks = end
        return SaveOrder(
            request.request_id,
            b"".join(request.block_hashes[:end]),
            first,
            tuple(block_ids[0][first:end]),
        )
