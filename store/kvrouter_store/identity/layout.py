"""Layouts: how the bytes of a part of a block are ordered. Touches no bytes of KV.

Two kinds. `opaque`: only an equal part may be read back. `opaque per head`: the bytes of one head
of one layer are contiguous, so that ranges of heads can be carried; only the engine knows what they
mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvrouter_store.errors import BadDocument

Scalar = str | int | bool | None
OPAQUE: Final = "opaque"
PER_HEAD: Final = "opaque per head"
MOST_BLOCK_BYTES: Final = 1 << 40  # of a part


@dataclass(frozen=True)
class Layout:
    """How the bytes of a part are ordered; equal layouts have the same kind, engine and fields.

    `engine` is a fingerprint of the engines that can read the bytes. Make one with `opaque` or
    `per_head`. An unknown kind counts as opaque.
    """

    kind: str
    engine: str
    fields: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if self.kind == PER_HEAD and self._head_bytes < 1:
            raise BadDocument("a layout that is opaque per head needs head_bytes of at least 1")

    @classmethod
    def opaque(cls, engine: str, fields: Mapping[str, Scalar] | None = None) -> "Layout":
        """A layout that only the same kind of engine can read."""
        return cls(OPAQUE, engine, _sorted(fields or {}))

    @classmethod
    def per_head(
        cls,
        engine: str,
        head_bytes: int,
        fields: Mapping[str, Scalar] | None = None,
    ) -> "Layout":
        """Layer by layer, head by head, `head_bytes` each, which only the engine understands."""
        return cls(PER_HEAD, engine, _sorted({**(fields or {}), "head_bytes": head_bytes}))

    def as_dict(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return {"engine": self.engine, "fields": dict(self.fields), "kind": self.kind}

    def check_part(
        self, layers: tuple[int, int], kv_heads: tuple[int, int], block_bytes: int
    ) -> None:
        """Raise BadDocument where a part of that size cannot have this layout."""
        if self.kind != PER_HEAD:
            return
        found = (layers[1] - layers[0]) * (kv_heads[1] - kv_heads[0]) * self._head_bytes
        if found > MOST_BLOCK_BYTES:
            raise BadDocument("a part cannot be laid out so: a block has too many bytes")
        if found != block_bytes:
            raise BadDocument(f"a part in this layout has {found} bytes a block, not {block_bytes}")

    @property
    def _head_bytes(self) -> int:
        """Bytes of one head of one layer; 0 where the fields do not say so."""
        found = dict(self.fields).get("head_bytes")
        return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _sorted(fields: Mapping[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted(fields.items()))
