"""Mooncake Store: keys of vLLM's MooncakeStoreConnector, which the master's admin port knows.

Sources: mooncake-store/src/master_admin_service.cpp of Mooncake 0.3.13 (`/batch_query_keys` does
not decode its query, and renews no lease), and store/data.py and store/worker.py of vLLM 0.32's
connector. The master also publishes events, but neither repeats lost ones nor says what was there
before: one question per prompt is always right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from kvrouter_store.identity.chain import HASH_BYTES, root_hash

if TYPE_CHECKING:
    from kvrouter.engines.engine import Identity
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.http_peer import HttpPeer

BATCH_KEYS: Final = 256
"""Keys of one question: 2 ms and 80 kB of the master."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:@/+-]*")
"""Needs no escape in a URL, and is no comma."""

Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class MooncakeOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The engines' topology, of which the keys consist. `tp` is of the KV, not of the engine.

    `groups`: those with full attention. Others store the last blocks alone.
    """

    tp: Size = 1
    pp: Size = 1
    pcp: Size = 1
    dcp: Size = 1
    groups: Annotated[str, msgspec.Meta(pattern=r"^\d+(,\d+)*$")] = "0"
    prefix: str = ""
    namespace: str = ""
    seed: str | None = None


class _Found(msgspec.Struct):
    ok: bool = False


class _Answer(msgspec.Struct):
    data: dict[str, _Found]


@dataclass(eq=False)
class MooncakeCatalogue:
    """Names blocks as the engines do. A block is there when all ranks' and groups' keys are."""

    keeps_engines: ClassVar[bool] = True

    peer: HttpPeer
    options: MooncakeOptions

    def __post_init__(self) -> None:
        of = self.options
        self._ranks = [
            f"{of.namespace}@tp_rank:{tp}@pcp{pcp}@dcp{tp % of.dcp}@pp_rank:{pp}@group:{group}@"
            for tp in range(of.tp)
            for pcp in range(of.pcp)
            for pp in range(of.pp)
            for group in of.groups.split(",")
        ]
        self._prefix = f"{of.prefix}@" if of.prefix else ""

    def adopt(self, identity: Identity) -> Identity:
        """Keys begin with the last part of the model's path; `seed` is the root of its hashes."""
        path = (identity.model_path or "").rstrip("/")
        root = identity.root if self.options.seed is None else root_hash(self.options.seed)
        return replace(identity, manifest=path.rpartition("/")[2] or None, root=root)

    def possible(self, manifest: str, upto: int, origin: Origin | None) -> int | None:
        """All of them, if the name can stand in a URL."""
        return upto if all(map(_PLAIN.fullmatch, self._beginnings(manifest))) else None

    async def held(
        self, manifest: str, hashes: bytes, held: int, upto: int, origin: Origin | None
    ) -> int:
        """By one batch of keys after the other, from the first that is not known to be there."""
        beginnings, end = self._beginnings(manifest), held
        while held == end < upto:
            end = min(upto, held + max(1, BATCH_KEYS // len(beginnings)))
            names = (hashes[n * HASH_BYTES : (n + 1) * HASH_BYTES].hex() for n in range(held, end))
            blocks = [[beginning + name for beginning in beginnings] for name in names]
            query = ",".join(key for keys in blocks for key in keys)
            found = (await self.peer.ask(f"/batch_query_keys?keys={query}", _Answer)).data
            there = (all(key in found and found[key].ok for key in keys) for keys in blocks)
            held += sum(takewhile(bool, there))
        return held

    def _beginnings(self, manifest: str) -> list[str]:
        """What the keys of one block begin with."""
        return [f"{self._prefix}{manifest}{rank}" for rank in self._ranks]
