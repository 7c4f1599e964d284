"""Layouts: how the bytes of a part of a block are ordered. Touches no bytes of KV.

Three kinds. `opaque`: only an equal part may be read back. `opaque per head`: what the bytes of
one head of one layer mean is known to the engine alone, but they lie together, so that layers and
ranges of heads can be carried. `ordered`: every byte's place is known, so that heads, layers,
tokens and the order itself can be changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvstore._core import PartShape
from kvstore.errors import BadDocument

__all__ = ["HND", "LATENT", "NHD", "OPAQUE", "ORDERED", "PER_HEAD", "Layout", "Scalar"]

Scalar = str | int | bool | None
OPAQUE: Final = "opaque"
PER_HEAD: Final = "opaque per head"
ORDERED: Final = "ordered"
# Outermost first: L layers, K keys and values, H heads, T tokens, E elements.
HND: Final = "LKHTE"
NHD: Final = "LKTHE"
LATENT: Final = "LTE"
ORDERED_FIELDS: Final = frozenset(
    {"order", "tokens", "element_bytes", "key_elements", "value_elements", "page_bytes"}
)


@dataclass(frozen=True)
class Layout:
    """How the bytes of a part are ordered; equal layouts have the same kind, engine and fields.

    `engine` is a fingerprint of whoever can read what is opaque; an ordered layout has none. Make
    one with `opaque`, `per_head` or `ordered`. A kind that is not known is as good as opaque.
    """

    kind: str
    engine: str
    fields: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if self.kind == ORDERED:
            self._check_ordered()
        elif self.kind == PER_HEAD and not _whole(self._field("head_bytes"), least=1):
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
        *,
        state: bool = False,
    ) -> "Layout":
        """Layer by layer, head by head, `head_bytes` each; the rest is the engine's secret.

        With `state` they are not of each token, but the state after the last token of the block.
        """
        own: dict[str, Scalar] = {**(fields or {}), "head_bytes": head_bytes}
        return cls(PER_HEAD, engine, _sorted(own | ({"state": True} if state else {})))

    @classmethod
    def ordered(
        cls,
        order: str,
        *,
        tokens: int,
        element_bytes: int,
        elements: tuple[int, int],
        page_bytes: int = 0,
    ) -> "Layout":
        """A layout in which every byte's place is known.

        order: the axes, outermost first: L layers, K keys and values, H heads, T tokens, E
            elements; such as HND or NHD. K is left out where there is one vector per token instead
            of two; H where heads have none of their own (LATENT), as with MLA.
        tokens: of one block; 0, and no T in the order, for the state after a block's last token.
        elements: of the keys and of the values of one token and head; no values: 0.
        page_bytes: what a layer takes with the padding behind it; 0: as much as it holds.
        """
        own: dict[str, Scalar] = {
            "order": order,
            "tokens": tokens,
            "element_bytes": element_bytes,
            "key_elements": elements[0],
            "value_elements": elements[1],
            "page_bytes": page_bytes,
        }
        return cls(ORDERED, "", _sorted(own))

    def as_dict(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return {"engine": self.engine, "fields": dict(self.fields), "kind": self.kind}

    @property
    def state(self) -> bool:
        """Whether it holds the state after a block's last token, and nothing of each token."""
        if self.kind == ORDERED:
            return self._field("tokens") == 0
        return self.kind == PER_HEAD and self._field("state") is True

    @property
    def tokens(self) -> int | None:
        """How many tokens a block of an ordered layout has; None where that is not told."""
        found = self._field("tokens") if self.kind == ORDERED and not self.state else None
        return found if isinstance(found, int) else None

    def shape(
        self, layers: tuple[int, int], kv_heads: tuple[int, int], segments: Sequence[int] = ()
    ) -> PartShape | None:
        """These layers and heads of a block in numbers; None where the layout is opaque.

        segments: sizes of the pieces of memory that a block lies in, in order; none: in one.
        Raises BadDocument where they do not go together.
        """
        if self.kind not in {ORDERED, PER_HEAD}:
            return None
        numbers = self._numbers
        try:
            return PartShape(layers, kv_heads, segments=segments, **numbers)
        except (ValueError, TypeError) as error:
            raise BadDocument(f"a part cannot be laid out so: {error}") from None

    def check_part(
        self, layers: tuple[int, int], kv_heads: tuple[int, int], block_bytes: int
    ) -> None:
        """Raise BadDocument where a part of that size cannot have this layout."""
        shape = self.shape(layers, kv_heads)
        if shape is not None and shape.block_bytes != block_bytes:
            raise BadDocument(
                f"a part in this layout has {shape.block_bytes} bytes a block, not {block_bytes}"
            )

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        found = dict(self.fields)
        if self.kind == PER_HEAD:
            return {"order": "LHE", "elements": (found["head_bytes"], 0)}
        return {
            "order": found["order"],
            "tokens": found["tokens"] or 1,
            "elements": (found["key_elements"], found["value_elements"]),
            "element_bytes": found["element_bytes"],
            "page_bytes": found["page_bytes"],
        }

    def _field(self, name: str) -> Scalar:
        return dict(self.fields).get(name)

    def _check_ordered(self) -> None:
        found = dict(self.fields)
        if found.keys() != ORDERED_FIELDS or self.engine:
            raise BadDocument(
                f"an ordered layout has the fields {', '.join(sorted(ORDERED_FIELDS))}, no engine"
            )
        numbers = [value for name, value in found.items() if name != "order"]
        order = found["order"]
        if not isinstance(order, str) or not all(_whole(value, least=0) for value in numbers):
            raise BadDocument("an ordered layout has an order of letters, and whole numbers")
        for letter, needed, what in (
            ("E", True, "elements"),
            ("L", True, "layers"),
            ("T", found["tokens"] != 0, "tokens"),
            ("K", found["value_elements"] != 0, "values"),
        ):
            if (letter in order) != needed:
                verb = "has no" if needed else "has"
                raise BadDocument(f"the order {order!r} {verb} {letter}, and its {what} say else")


def _sorted(fields: Mapping[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted(fields.items()))


def _whole(value: Scalar, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
