"""YAML documents with bounded aliases and nesting.

An alias of three bytes stands for all values of its anchor, so that a few lines could stand for
billions of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_VALUES: Final = 200_000  # values in a document with its aliases expanded
MAX_DEPTH: Final = 32  # nested lists and mappings


class TooMuch(ValueError):
    """The document has too many values or levels; a sentence."""


def bounded_root(loader: yaml.SafeLoader) -> yaml.Node | None:
    """The root of the document of `loader`; None if it is empty.

    TooMuch: it has too many values or levels. yaml.YAMLError: it is not YAML.
    """
    try:
        root = loader.get_single_node()
        if root is not None:
            _measure(root, {})
    except RecursionError:
        raise _too_deep() from None
    return root


def load_bounded(loader: yaml.SafeLoader) -> Any:
    """The value of the document of `loader`.

    TooMuch: as above. yaml.YAMLError: as above, or its values are wrong.
    """
    root = bounded_root(loader)
    return loader.construct_document(root) if root is not None else None


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Values and levels of `node`; `known` has those of nodes that were measured before."""
    found = known.get(id(node))
    if found is not None:
        return found
    known[id(node)] = (0, MAX_DEPTH + 1)  # for a node that contains itself
    values, depth = 1, 0
    for child in _children(node):
        more, below = _measure(child, known)
        values, depth = values + more, max(depth, below + 1)
    if depth > MAX_DEPTH:
        raise _too_deep()
    if values > MAX_VALUES:
        raise TooMuch(f"more than {MAX_VALUES} values with its aliases expanded")
    known[id(node)] = (values, depth)
    return values, depth


def _children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (each for pair in node.value for each in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _too_deep() -> TooMuch:
    return TooMuch(f"more than {MAX_DEPTH} levels of lists or mappings")
