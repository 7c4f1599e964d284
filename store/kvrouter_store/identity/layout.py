"""Layouts: how the bytes of a part of a block are ordered. Touches no bytes of KV.

Three kinds. `opaque`: only an equal part may be read back. `opaque per head`: the bytes of one head
of one layer are contiguous, so that ranges of heads can be carried; only the engine knows what they
mean. `ordered`: the place of every byte is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvrouter_store.errors import BadDocument

Scalar = str | int | bool | None
OPAQUE: Final = "opaque"
PER_HEAD: Final = "opaque per head"
ORDERED: Final = "ordered"
# Outermost first: L layers, K keys and values, H heads, T tokens, E elements.
HND: Final = "LKHTE"
NHD: Final = "LKTHE"
LATENT: Final = "LTE"
MOST_BLOCK_BYTES: Final = 1 << 40  # of a part
ORDERED_FIELDS: Final = frozenset(
    {"order", "tokens", "element_bytes", "key_elements", "value_elements", "page_bytes"}
)


@dataclass(frozen=True)
class Layout:
    """How the bytes of a part are ordered; equal layouts have the same kind, engine and fields.

    `engine` is a fingerprint of the engines that can read opaque bytes; an ordered layout has none.
    Make one with `opaque`, `per_head` or `ordered`. An unknown kind counts as opaque.
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
        """Layer by layer, head by head, `head_bytes` each, which only the engine understands.

        With `state` they hold the state after the last token of the block, and nothing per token.
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
            elements; such as HND or NHD. Without K: one vector per token instead of two. Without
            H: heads share their elements (LATENT), as with MLA.
        tokens: of one block; 0, and no T in the order, for the state after a block's last token.
        elements: of the keys and of the values of one token and head; 0 for no values.
        page_bytes: bytes of a layer with its padding; 0: without padding.
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
        """Whether it holds the state after a block's last token, and nothing per token."""
        if self.kind == ORDERED:
            return self._field("tokens") == 0
        return self.kind == PER_HEAD and self._field("state") is True

    @property
    def tokens(self) -> int | None:
        """How many tokens a block of an ordered layout has; None for other layouts and states."""
        found = self._field("tokens") if self.kind == ORDERED and not self.state else None
        return found if isinstance(found, int) else None

    def check_part(
        self, layers: tuple[int, int], kv_heads: tuple[int, int], block_bytes: int
    ) -> None:
        """Raise BadDocument where a part of that size cannot have this layout."""
        if self.kind not in {ORDERED, PER_HEAD}:
            return
        found = (layers[1] - layers[0]) * self._layer_bytes(kv_heads[1] - kv_heads[0])
        if found > MOST_BLOCK_BYTES:
            raise _cannot_be("a block has too many bytes")
        if found != block_bytes:
            raise BadDocument(f"a part in this layout has {found} bytes a block, not {block_bytes}")

    def _layer_bytes(self, heads: int) -> int:
        """Bytes of `heads` heads of one layer of a block, with the padding."""
        found: dict[str, Any] = dict(self.fields)
        if self.kind == PER_HEAD:
            return heads * int(found["head_bytes"])
        _check_order(found, heads)
        elements = (found["tokens"] or 1) * (found["key_elements"] + found["value_elements"])
        held, page = heads * elements * found["element_bytes"], int(found["page_bytes"])
        if page and page < held:
            raise _cannot_be("a page is smaller than the layer that it holds")
        return page or int(held)

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


def _check_order(found: Mapping[str, Any], heads: int) -> None:
    """Raise BadDocument where the order and the numbers beside it contradict each other."""
    order, sizes = found["order"], (found["key_elements"], found["value_elements"])
    if not (sizes[0] and found["element_bytes"]):
        raise _cannot_be("tokens, elements and the bytes of an element must be at least 1")
    if not set(order) <= set(HND) or len(set(order)) < len(order):
        raise _cannot_be("the order must be made of L, K, H, T and E, each at most once")
    if heads > 1 and "H" not in order:
        raise _cannot_be("the order leaves out an axis that has more than one")
    if found["page_bytes"] and not order.startswith("L"):
        raise _cannot_be("pages are of layers: the order must begin with L")
    if 0 <= order.find("E") < order.find("K") and sizes[0] != sizes[1]:
        raise _cannot_be("keys and values of different size cannot alternate by element")


def _cannot_be(why: str) -> BadDocument:
    return BadDocument(f"a part cannot be laid out so: {why}")


def _whole(value: Scalar, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
