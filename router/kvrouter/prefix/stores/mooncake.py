"""Mooncake Store: keys of vLLM's MooncakeStoreConnector, which the master's admin port knows.

Sources: mooncake-store/src/master_admin_service.cpp of Mooncake 0.3.13 (`/batch_query_keys` does
not decode its query, and renews no lease), and store/data.py and store/worker.py of vLLM 0.32's
connector. The master also publishes events, but neither repeats lost ones nor says what was there
before: one question per prompt is always right.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from kvrouter_store.identity.chain import HASH_BYTES, root_hash

if TYPE_CHECKING:
    from kvrouter.engines.engine import Identity
    from kvrouter.prefix.stores.base import Origin
    from kvrouter.prefix.stores.polling import HttpPeer, Question

BATCH_KEYS: Final = 256  # keys of one question: 2 ms and 80 kB of the master
_PLAIN: Final = r"^[A-Za-z0-9._:@/+-]*\Z"  # needs no escape in a URL, and is no comma

Size = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class _Found(msgspec.Struct, gc=False):
    ok: bool = False


class _Answer(msgspec.Struct):
    data: dict[str, _Found]


class MooncakeCatalogue(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Names blocks as the engines do. A block is there when all ranks' and groups' keys are.

    `tp` is of the KV, not of the engine. `groups`: those with full attention. Others store the last
    blocks alone.
    """

    health_path: ClassVar[str] = "/batch_query_keys?keys=-"
    keeps_engines: ClassVar[bool] = True
    server: ClassVar[str] = "the --metrics_port of a Mooncake master"
    silence: ClassVar[str] = (
        "puts fail, or its options are not the engines': compare with the master's /get_all_keys"
    )
    forms: ClassVar[str] = "tp=COUNT, pp=COUNT, groups=0,1, prefix=TEXT and seed=TEXT"

    tp: Size = 1
    pp: Size = 1
    groups: Annotated[str, msgspec.Meta(pattern=r"^\d+(,\d+)*\Z")] = "0"
    prefix: Annotated[str, msgspec.Meta(pattern=_PLAIN)] = ""
    seed: str | None = None

    def named(self, identity: Identity) -> Identity:
        """Keys begin with the last part of the model's path; `seed` is the root of its hashes."""
        name = (identity.model_path or "").rstrip("/").rpartition("/")[2]
        manifest = f"{self.prefix}@{name}" if self.prefix else name
        return replace(
            identity,
            manifest=manifest if name and re.match(_PLAIN, name) else None,
            root=identity.root if self.seed is None else root_hash(self.seed),
        )

    def possible(self, upto: int, origin: Origin | None) -> int:
        """All of them."""
        return upto

    async def held(self, peer: HttpPeer, question: Question) -> int:
        """By batches of keys, from the first block that is not known to be there."""
        beginnings = [
            f"{question.manifest}@tp_rank:{tp}@pcp0@dcp0@pp_rank:{pp}@group:{group}@"
            for tp in range(self.tp)
            for pp in range(self.pp)
            for group in self.groups.split(",")
        ]
        hashes, held, upto = question.hashes, question.found, question.upto
        end = held
        while held == end < upto:
            end = min(upto, held + max(1, BATCH_KEYS // len(beginnings)))
            names = (hashes[n * HASH_BYTES : (n + 1) * HASH_BYTES].hex() for n in range(held, end))
            blocks = [[beginning + name for beginning in beginnings] for name in names]
            query = ",".join(key for keys in blocks for key in keys)
            found = (await peer.ask(f"/batch_query_keys?keys={query}", _Answer)).data
            there = (all(key in found and found[key].ok for key in keys) for keys in blocks)
            held += sum(takewhile(bool, there))
        return held
