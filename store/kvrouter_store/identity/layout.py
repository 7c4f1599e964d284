"""Layouts: how the bytes of a part of a block are ordered. Touches no bytes of KV."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Scalar = str | int | bool | None
OPAQUE: Final = "opaque"


@dataclass(frozen=True)
class Layout:
    """How the bytes of a part are ordered; equal layouts have the same kind, engine and fields.

    `engine` is a fingerprint of the engines that can read the bytes. Make one with `opaque`. An
    unknown kind counts as opaque: only an equal part is read back.
    """

    kind: str
    engine: str
    fields: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def opaque(cls, engine: str, fields: Mapping[str, Scalar] | None = None) -> "Layout":
        """A layout that only the same kind of engine can read."""
        return cls(OPAQUE, engine, tuple(sorted((fields or {}).items())))

    def as_dict(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return {"engine": self.engine, "fields": dict(self.fields), "kind": self.kind}
