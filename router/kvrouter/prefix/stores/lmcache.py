"""LMCache's coordinator, whose directory says what multiprocess servers hold, by token ids.

Source: lmcache/v1/mp_coordinator of LMCache 0.5.6 (http_apis/directory_api.py, schemas.py). The
directory follows servers by events, some time behind them. Engines do without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from kvrouter_store.errors import StoreRefused

if TYPE_CHECKING:
    from kvrouter.engines.engine import Identity
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.http_peer import HttpPeer

MAX_TOKENS: Final = 1_000_000
"""The coordinator refuses more."""
_ID_BYTES: Final = 4

Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]


class LmcacheOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """As LMCache was started. `tier`: "l2" where servers share only their L2."""

    chunk_size: Size = 256
    world_size: Size = 1
    tier: Literal["any", "l2"] = "any"


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


@dataclass(eq=False)
class LmcacheCatalogue:
    """Names prompts by their tokens. LMCache's keys know no adapters: those have nothing here."""

    keeps_engines: ClassVar[bool] = False

    peer: HttpPeer
    options: LmcacheOptions

    def adopt(self, identity: Identity) -> Identity:
        """Keys carry the model's whole path."""
        return replace(identity, manifest=identity.model_path)

    def possible(self, manifest: str, upto: int, origin: Origin | None) -> int | None:
        """Those in whole chunks."""
        if origin is None or origin.adapter is not None:
            return None
        tokens = self._whole(upto, origin)
        return tokens // origin.block_tokens if tokens <= MAX_TOKENS else None

    async def held(
        self, manifest: str, hashes: bytes, held: int, upto: int, origin: Origin | None
    ) -> int:
        """By one question. A chunk is there when every rank's key has a place."""
        if origin is None:
            return held
        size, tokens = self.options.chunk_size, self._whole(upto, origin)
        question = {
            "model_name": manifest,
            "world_size": self.options.world_size,
            "token_ids": memoryview(origin.ids)[: tokens * _ID_BYTES].cast("I").tolist(),
            "cache_salt": origin.cache_salt or "",
        }
        sent = msgspec.json.encode(question)
        answer = await self.peer.ask("/directory/lookup", _Answer, sent)
        if answer.chunks != tokens // size:
            raise StoreRefused(
                f"the coordinator's chunks are not of {size} tokens: give its --chunk-size as "
                "lmcache://HOST:PORT?chunk_size=TOKENS"
            )
        there: dict[str, bool] = {}
        for result in answer.results:
            name = result.key.chunk_hash_hex
            placed = any(self.options.tier in {"any", each.tier} for each in result.placements)
            there[name] = there.get(name, True) and placed
        leading = sum(takewhile(bool, there.values()))
        return upto if leading == answer.chunks else leading * size // origin.block_tokens

    def _whole(self, blocks: int, origin: Origin) -> int:
        """Tokens of whole chunks within `blocks`."""
        size = self.options.chunk_size
        return blocks * origin.block_tokens // size * size
