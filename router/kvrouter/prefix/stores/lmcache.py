"""LMCache's coordinator, whose directory says what multiprocess servers hold, by token ids.

Source: lmcache/v1/mp_coordinator of LMCache 0.5.6 (http_apis/directory_api.py, schemas.py). The
directory follows servers by events, some time behind them. Engines do without it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

if TYPE_CHECKING:
    from kvrouter.engines.engine import Identity
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.http_peer import HttpPeer

log = logging.getLogger(__name__)

Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]


class _Key(msgspec.Struct):
    chunk_hash_hex: str


class _Placement(msgspec.Struct):
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

    async def held(
        self, peer: HttpPeer, manifest: str, hashes: bytes, span: range, origin: Origin | None
    ) -> int:
        """By one question. A chunk is there when every rank's key has a place."""
        if origin is None or not span:
            return span.start
        tokens = span.stop * origin.block_tokens
        question = {
            "model_name": manifest,
            "world_size": self.world_size,
            "token_ids": memoryview(origin.ids).cast("I")[:tokens].tolist(),
            "cache_salt": origin.cache_salt or "",
        }
        answer = await peer.ask("/directory/lookup", _Answer, msgspec.json.encode(question))
        if answer.chunks * self.chunk_size != tokens:
            raise peer.refusal(
                f"its chunks are not of {self.chunk_size} tokens: give its --chunk-size as "
                "lmcache://HOST:PORT?chunk_size=TOKENS"
            )
        there: dict[str, bool] = {}
        for result in answer.results:
            name = result.key.chunk_hash_hex
            placed = any(self.tier in {"any", each.tier} for each in result.placements)
            there[name] = there.get(name, True) and placed
        first, per_chunk = span.start * origin.block_tokens // self.chunk_size, self.chunk_size
        known = list(there.values())[first:]
        return (first + sum(takewhile(bool, known))) * per_chunk // origin.block_tokens
