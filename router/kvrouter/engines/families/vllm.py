"""vLLM's dialect, with connectors that share KV through a store (ours, LMCache, Mooncake's).

Sources: vllm/entrypoints/openai/*/protocol.py of vLLM 0.32; `parameters.py` says what each leg does
with each parameter.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

import orjson

from kvrouter._native import find_token_ids
from kvrouter.engines.engine import CacheGroup
from kvrouter.engines.families.base import (
    BadAnswer,
    Family,
    Handoff,
    LegOrder,
    NothingLanded,
    told_tokens,
)
from kvrouter.engines.families.parameters import VLLM
from kvrouter.engines.families.splice import splice
from kvrouter.errors import bad_request
from kvrouter.http.bounded_json import bounded
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connectors.vllm_tier.announced import HINT, fetch_hint
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvrouter.engines.families.base import Changes, KvSource, PendingKv
    from kvrouter.engines.families.pages import EnginePages
    from kvrouter.engines.families.parameter_table import ParameterTable
    from kvrouter.openai.request import Request

MEDIA: Final = (b'"image', b'"input_audio"', b'"audio_', b'"video', b'"input_image"')
"""Beginnings of the types of message content whose block hashes depend on more than tokens."""

TRANSFER: Final = "kv_transfer_params"
GREEDY_BELOW: Final = 1e-5  # vLLM treats lower temperatures as 0 (vllm/sampling_params.py)
IDS_KEY: Final = "prompt_token_ids"
_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d{1,9})"', re.M)
_BLOCKS: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bnum_gpu_blocks="(\d{1,12})"', re.M)
_NIXL: Final = re.compile(rb"^vllm:nixl_", re.M)
_CAUSES: Final[Mapping[str, NothingLanded]] = {str(cause): cause for cause in NothingLanded}
_RANKS: Final = re.compile(rb'^vllm:num_requests_running\{[^}\n]*\bengine="(\d{1,9})"', re.M)

log = logging.getLogger(__name__)


class Vllm(Family):
    """Engines of vLLM whose connector finds its KV without parameters of a request."""

    name: ClassVar[str] = "store"
    summary: ClassVar[str] = "kvrouter's connector, LMCache or MooncakeStore"
    connects_publisher: ClassVar[bool] = True
    parameters: ClassVar[ParameterTable] = VLLM
    order: ClassVar[LegOrder] = LegOrder.STORE
    detected_by: ClassVar[tuple[str, str] | None] = ("/version", "version")
    events_page: ClassVar[str | None] = "/kv_event_sources"  # since 0.33
    varies_seeds: ClassVar[bool] = True  # vllm/v1/engine/parallel_sampling.py
    schedules_by_priority: ClassVar[bool] = True
    can_isolate: ClassVar[bool] = True
    reads_salts: ClassVar[bool] = True

    def unsplittable(self, request: Request) -> str | None:
        """The first parameter of the request that the table has decoded alone."""
        return self.parameters.alone(request)

    def needs_legs_per_sample(self, request: Request) -> bool:
        """Where engines hand KV over themselves: the first sample that fetches it frees it.

        ApiError 400, in vLLM's words: several samples at temperature 0.
        """
        if not super().needs_legs_per_sample(request):
            return False
        temperature = orjson.loads(request.raw("temperature") or b"1")
        if isinstance(temperature, int | float) and temperature < GREEDY_BELOW:
            raise bad_request(f"n must be 1 when using greedy sampling, got {request.n}.")
        return True

    def reports_tokens(self, request: Request) -> bool:
        """Completions and chats without media, whose messages token ids can replace.

        vllm/renderers/online_renderer.py (`_reused_prompt_token_ids`), from 0.32 on. Older engines
        render the messages, which their first event shows (`prompt_token_ids`).
        """
        return self.hashable(request)

    def hashable(self, request: Request) -> bool:
        """Prompts without media."""
        span = request.spans.get("messages") or request.spans.get("input")
        if span is None:
            return True
        return not any(request.body.find(mark, *span) >= 0 for mark in MEDIA)

    def isolated_body(self, request: Request, *, salt: bytes, prompt_ids: bytes | None) -> bytes:
        """A salt changes its block hashes: neither the engine's cache nor a connector has them.

        vllm/v1/core/kv_cache_utils.py counts `cache_salt` into the first block's hash.
        """
        changes = self._left_out(request)
        changes |= {"cache_salt": salt, "return_token_ids": b"true", "stream_options": None}
        if request.stream:
            changes["stream"] = b"false"
        self._put_ids(request, changes, prompt_ids)
        return splice(request.body, request.spans, changes)

    def _decode_members(self, handoff: Handoff | None) -> Changes:
        transfer = handoff.transfer_params if handoff is not None else None
        return {TRANSFER: transfer} if transfer is not None else {}

    def _store_members(self, pending: PendingKv | None, source: KvSource | None) -> Changes:
        told: dict[str, Any] = {}
        hint: dict[str, Any] = {}
        if pending is not None:
            told |= {"coming_blocks": pending.blocks, "wait_s": pending.wait_s}
        if source is not None:
            told["source"] = source.node  # for connectors of 0.1, which know no hints
            if source.block_hashes:
                hint[HINT] = fetch_hint(source.message_id, source.node, source.block_hashes)
        return {TRANSFER: orjson.dumps({"kvstore": told, **hint})} if told else {}

    def _put_ids(self, request: Request, changes: Changes, ids: bytes | None) -> None:
        """A chat takes ids within the transfer parameters (vLLM 0.32 on)."""
        if ids is not None and request.kind == "completion":
            changes["prompt"] = ids
        elif ids is not None and self.hashable(request):
            transfer = changes.get(TRANSFER)
            rest = b"," + transfer[1:] if transfer and transfer != b"{}" else b"}"
            changes[TRANSFER] = b'{"prompt_token_ids":' + ids + rest

    def release_body(self, model: str, params: bytes) -> bytes | None:
        """A request that vLLM refuses after it has read `kv_transfer_params`.

        It then notifies the prefill engine that nothing will be fetched
        (entrypoints/generate/base/serving.py, `_with_kv_transfer_rejection_cleanup`). A request
        that is cut off would not do: the server may notice that before it reads the body.
        """
        head = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": -1}
        return orjson.dumps(head)[:-1] + b',"%b":%b}' % (TRANSFER.encode(), params)

    def read_prefill_answer(self, body: bytes) -> Handoff:
        """Its usage and the connector's report; token ids are read natively, not parsed."""
        found = find_token_ids(body, IDS_KEY)
        rest = body
        if found is not None:
            rest = body[: found[0]] + b"null" + body[found[1] :]
        try:
            answer = orjson.loads(bounded(rest))
            if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
                raise BadAnswer("no completion")
            handoff = self._handoff(answer)
        except (ValueError, TypeError, AttributeError) as error:
            raise BadAnswer(f"prefill answer: {error}") from None
        if found is not None:
            handoff.prompt_token_ids, handoff.ids = body[found[0] : found[1]], found[2]
        return handoff

    def _handoff(self, answer: dict[str, Any]) -> Handoff:
        params = answer.get(TRANSFER) or {}
        store = params.get("kvstore") or {}
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details")
        reused = None if details is None else told_tokens(details.get("cached_tokens")) or 0
        root = bytes.fromhex(store["root"]) if store.get("root") else None
        if root is not None and len(root) != HASH_BYTES:
            raise BadAnswer(f"a root of {len(root)} bytes")
        return Handoff(
            manifest=store.get("manifest") or None,
            groups=tuple(map(_group, store.get("groups") or ())),
            blocks=max(0, int(store.get("blocks") or 0)),
            cause=_CAUSES.get(str(store.get("cause")), NothingLanded.NOT_PUT),
            block_tokens=max(0, int(store.get("block_tokens") or 0)),
            root=root,
            refusal=str(store["refusal"])[:500] if store.get("refusal") else None,
            waits=store.get("waits") is True,
            node=_node(store.get("node")),
            prompt_tokens=told_tokens(usage.get("prompt_tokens")),
            cached_tokens=(reused or 0) if usage else None,
            reused_tokens=reused,
            held_tokens=told_tokens(store.get("held")),
        )

    def probe_body(self, model: str, *, priority: int | None = None) -> bytes | None:
        """One token after one token: the smallest request that every model takes."""
        probe = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
        return orjson.dumps(probe if priority is None else {**probe, "priority": priority})

    def trial(self, model: str) -> tuple[str, bytes | None]:
        """The probe."""
        return "/v1/completions", self.probe_body(model)

    async def by_probe(self, handoff: Handoff, pages: EnginePages) -> str:
        """By its connector; of two (MultiConnector), NixlConnector is what hands KV over."""
        if _NIXL.search(await pages.metrics()) is not None:
            log.info("engine %s is vLLM with NixlConnector, by its metrics", pages.engine.address)
            return "nixl"
        if handoff.manifest is None:
            log.warning(
                "engine %s is vLLM, and neither kvrouter's connector nor NixlConnector was found "
                "in it: the router assumes that it shares KV through a store of its own (LMCache, "
                "MooncakeStore), or not at all. MooncakeConnector cannot be detected: give "
                "--kv-connector mooncake",
                pages.engine.address,
            )
        return self.name

    async def event_ranks(self, pages: EnginePages) -> tuple[int, ...]:
        """The labels of its metrics."""
        found = _RANKS.findall(await pages.metrics())
        return tuple(sorted({int(number) for number in found}))

    async def block_tokens(self, pages: EnginePages) -> int:
        """From vllm:cache_config_info."""
        found = _BLOCK_SIZE.search(await pages.metrics())
        return int(found.group(1)) if found else 0

    async def kv_tokens(self, pages: EnginePages) -> int:
        """From vllm:cache_config_info, which each rank has."""
        blocks = map(int, _BLOCKS.findall(await pages.metrics()))
        return sum(blocks) * await self.block_tokens(pages)

    async def version(self, pages: EnginePages) -> object:
        """From /version."""
        return (await pages.json("/version")).get("version")


@lru_cache(maxsize=1024)
def _node(said: object) -> str | None:
    """A store node's URL in its one form; None: it is none."""
    try:
        return str(parse_url(said)) if isinstance(said, str) else None
    except ValueError:
        return None


def _group(said: dict[str, Any]) -> CacheGroup:
    """One of an engine's cache groups, as its connector says; ValueError: it names no manifest."""
    manifest, reach = said.get("manifest"), said.get("reach")
    if not isinstance(manifest, str):
        raise ValueError("a cache group without a manifest")
    return CacheGroup(manifest, None if reach is None else max(1, int(reach)))
