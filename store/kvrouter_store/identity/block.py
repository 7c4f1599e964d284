"""Identity of KV: cache spec, part, manifest and their digests. Touches no bytes of KV.

A block's identity is logical: which tokens (the chain hash) under which cache spec. What is stored
are parts: some layers and heads of a block in one layout. A manifest lists the parts that together
make a block usable for an engine; match, landing, lease and eviction act on all of them or none.
Digests are SHA-256 of canonical JSON (sorted keys, no spaces, UTF-8), so that two processes that
mean the same thing compute the same name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from kvrouter_store.errors import BadDocument
from kvrouter_store.identity.layout import Layout

DOCUMENT_VERSION = 1
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that digests are computed over."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


@dataclass(frozen=True)
class CacheSpec:
    """What makes equal tokens different KV. Engines share blocks only under equal specs.

    `root` is the hex of the chain's root hash (32 bytes), `groups` the attention kind of each cache
    group in order, `adapters` the adapters whose KV differs although the tokens do not.
    """

    model: str
    weights_revision: str
    kv_dtype: str
    block_tokens: int
    hash_algo: str
    root: str
    groups: tuple[str, ...] = ("full_attention",)
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise BadDocument(f"block_tokens must be at least 1, got {self.block_tokens}")
        if not self.groups:
            raise BadDocument("a cache spec needs at least one cache group")
        try:
            root_bytes = len(bytes.fromhex(self.root))
        except ValueError:
            root_bytes = -1
        if root_bytes != 32:
            raise BadDocument(f"root must be 64 hex digits, got {self.root!r}")

    def as_dict(self) -> dict[str, Any]:
        """The spec as JSON values."""
        return asdict(self)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the spec."""
        return sha256(canonical_json(self.as_dict())).digest()


@dataclass(frozen=True)
class Part:
    """What one engine rank holds of a block: layers x KV heads of one cache group, in one layout.

    `layers` and `kv_heads` are half-open ranges (first, end); `block_bytes` is the part's size.
    """

    layers: tuple[int, int]
    kv_heads: tuple[int, int]
    group: int
    block_bytes: int
    layout: Layout

    def __post_init__(self) -> None:
        for name, (first, end) in (("layers", self.layers), ("kv_heads", self.kv_heads)):
            if not 0 <= first < end:
                raise BadDocument(f"{name} must be a range with first < end, got {first}..{end}")
        if self.block_bytes < 1 or self.group < 0:
            raise BadDocument("a part has a group of at least 0 and block_bytes of at least 1")

    def as_dict(self) -> dict[str, Any]:
        """The part as JSON values."""
        return {
            "block_bytes": self.block_bytes,
            "group": self.group,
            "kv_heads": list(self.kv_heads),
            "layers": list(self.layers),
            "layout": self.layout.as_dict(),
        }

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the part (under any spec)."""
        return sha256(canonical_json(self.as_dict())).digest()


@dataclass(frozen=True)
class Manifest:
    """The full set of parts that an engine needs of each block; its rank r owns `parts[r]`."""

    spec: CacheSpec
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise BadDocument("a manifest needs at least one part")
        if len({part.digest for part in self.parts}) != len(self.parts):
            raise BadDocument("two parts of a manifest are the same")
        if any(part.group >= len(self.spec.groups) for part in self.parts):
            raise BadDocument("a part names a cache group that the spec does not have")

    def as_dict(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        return {
            "parts": [part.as_dict() for part in self.parts],
            "spec": self.spec.as_dict(),
            "version": DOCUMENT_VERSION,
        }

    @cached_property
    def doc(self) -> bytes:
        """The canonical document that is registered with the store."""
        return canonical_json(self.as_dict())

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the manifest: SHA-256 of `doc`."""
        return sha256(self.doc).digest()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all parts."""
        return sum(part.block_bytes for part in self.parts)

    @classmethod
    def from_doc(cls, doc: bytes) -> "Manifest":
        """Read back what `doc` wrote. Raises BadDocument on anything else."""
        try:
            tree = json.loads(doc)
            if tree["version"] != DOCUMENT_VERSION:
                raise BadDocument(f"manifest of version {tree['version']!r} is not understood")
            spec = dict(tree["spec"])
            spec["groups"] = tuple(spec["groups"])
            spec["adapters"] = tuple(spec["adapters"])
            manifest = cls(CacheSpec(**spec), tuple(_part(item) for item in tree["parts"]))
        except _UNREADABLE as error:
            raise BadDocument(f"not a manifest: {error!r}") from error
        return manifest


def _part(tree: Mapping[str, Any]) -> Part:
    layers_first, layers_end = tree["layers"]
    heads_first, heads_end = tree["kv_heads"]
    layout = tree["layout"]
    return Part(
        layers=(int(layers_first), int(layers_end)),
        kv_heads=(int(heads_first), int(heads_end)),
        group=int(tree["group"]),
        block_bytes=int(tree["block_bytes"]),
        layout=Layout(layout["kind"], layout["engine"], tuple(sorted(layout["fields"].items()))),
    )
