"""LMCache's coordinator, whose directory says what multiprocess servers hold, by token ids.

Source: lmcache/v1/mp_coordinator of LMCache 0.5.6 (http_apis/directory_api.py, schemas.py). The
directory follows servers by events, some time behind them. Engines do without it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

if TYPE_CHECKING:
    from kvrouter.engines.engine import Identity
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.polling import HttpPeer, Question

log = logging.getLogger(__name__)

Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]


LOOKUP: Final = "/directory/lookup"
BATCH_KEYS: Final = 256
"""Keys of one question, whose answers hold the tokens of those that are there."""


class _Key(msgspec.Struct, frozen=True, gc=False):
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class _Placement(msgspec.Struct, gc=False):
    tier: str


class _Result(msgspec.Struct):
    key: _Key
    placements: list[_Placement]


class _Answer(msgspec.Struct):
    chunks: int
    results: list[_Result]


class LmcacheCatalogue(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Names prompts by their tokens. LMCache's keys know no adapters: those have nothing here.

    As LMCache was started. `tier`: "l2" where servers share only their L2.
    """

    health_path: ClassVar[str] = "/directory/stats"
    keeps_engines: ClassVar[bool] = False
    server: ClassVar[str] = "the port of LMCache's coordinator"
    silence: ClassVar[str] = (
        "LMCache's servers do not report to it (--coordinator-event-reporting), or it missed what "
        "they reported earlier (it restarted without --checkpoint-path), or world_size or its "
        "--hash-algorithm is not theirs; with --enable-prompt-tokens-details, engines tell the "
        "router what they reuse, which then needs no report"
    )
    forms: ClassVar[str] = "chunk_size=TOKENS, world_size=COUNT and tier=any or l2"

    chunk_size: Size = 256
    world_size: Size = 1
    tier: Literal["any", "l2"] = "any"

    def named(self, identity: Identity) -> Identity:
        """Keys carry the model's whole path."""
        if identity.block_tokens and self.chunk_size % identity.block_tokens:
            log.warning(
                "nothing of %s matches in LMCache: its blocks of %d tokens do not divide chunks of "
                "%d; give lmcache://HOST:PORT?chunk_size=TOKENS as LMCache's --chunk-size",
                identity.models[0],
                identity.block_tokens,
                self.chunk_size,
            )
        return replace(identity, manifest=identity.model_path)

    def possible(self, upto: int, origin: Origin | None) -> int:
        """Those in whole chunks, which LMCache has of whole blocks only."""
        if origin is None or origin.adapter is not None or self.chunk_size % origin.block_tokens:
            return 0
        return upto - upto % (self.chunk_size // origin.block_tokens)

    async def held(self, peer: HttpPeer, question: Question) -> int:
        """By one question first. A chunk is there when every rank's key has a place.

        Then by keys, which the coordinator need not compute from tokens again: those of the last
        chunk that is not there, and the others once it is.
        """
        origin, missing = question.origin, question.missing
        if origin is None or question.found >= question.upto:
            return question.found
        per_chunk = self.chunk_size // origin.block_tokens
        if not missing:
            await self._ask_tokens(peer, question, origin)
        else:
            last = max(missing.values())
            await self._ask_keys(peer, missing, [k for k, at in missing.items() if at == last])
            if question.final or last not in missing.values():
                await self._ask_keys(peer, missing, list(missing))
        return min(missing.values(), default=question.upto // per_chunk) * per_chunk

    async def _ask_tokens(self, peer: HttpPeer, question: Question, origin: Origin) -> None:
        """Note all keys beyond those that are held and have no place, by number of chunk."""
        tokens = question.upto * origin.block_tokens
        sent = {
            "model_name": question.manifest,
            "world_size": self.world_size,
            "token_ids": memoryview(origin.ids).cast("I")[:tokens].tolist(),
            "cache_salt": origin.cache_salt or "",
        }
        answer = await peer.ask(LOOKUP, _Answer, msgspec.json.encode(sent))
        if answer.chunks * self.chunk_size != tokens:
            raise peer.refusal(
                f"its chunks are not of {self.chunk_size} tokens: give its --chunk-size as "
                "lmcache://HOST:PORT?chunk_size=TOKENS"
            )
        numbers: dict[str, int] = {}
        for result in answer.results:
            number = numbers.setdefault(result.key.chunk_hash_hex, len(numbers))
            known = (number + 1) * self.chunk_size <= question.found * origin.block_tokens
            if not known and not self._placed(result):
                question.missing[result.key] = number

    async def _ask_keys(
        self, peer: HttpPeer, missing: dict[object, int], keys: list[object]
    ) -> None:
        """Take those that have a place by now from `missing`, up to a batch that is not whole."""
        for begin in range(0, len(keys), BATCH_KEYS):
            batch = keys[begin : begin + BATCH_KEYS]
            answer = await peer.ask(LOOKUP, _Answer, msgspec.json.encode({"keys": batch}))
            for result in filter(self._placed, answer.results):
                missing.pop(result.key, None)
            if any(key in missing for key in batch):
                return

    def _placed(self, result: _Result) -> bool:
        return any(self.tier in {"any", each.tier} for each in result.placements)
