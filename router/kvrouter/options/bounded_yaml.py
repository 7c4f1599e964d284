"""YAML documents whose aliases and nesting are bounded, so that a small file is little work.

An alias costs three bytes and stands for all that its anchor holds. A few lines of them can stand
for billions of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_VALUES: Final = 200_000
"""Values in a document with all aliases written out."""
MAX_DEPTH: Final = 32
"""Lists and mappings within each other."""


class TooMuch(ValueError):
    """The document holds too much; a sentence."""


def bounded_root(loader: yaml.SafeLoader) -> yaml.Node | None:
    """The root of the one document of `loader`; None where it is empty.

    Raises:
        TooMuch: it has too many values, or is nested too deep.
        yaml.YAMLError: it is not YAML.
    """
    try:
        root = loader.get_single_node()
        if root is not None:
            _measure(root, {})
    except RecursionError:
        raise _too_deep() from None
    return root


def load_bounded(loader: yaml.SafeLoader) -> Any:
    """What the document says.

    Raises:
        TooMuch: as above.
        yaml.YAMLError: as above, or its values cannot be made.
    """
    root = bounded_root(loader)
    return loader.construct_document(root) if root is not None else None


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Values in `node` and its depth; `known` are those of nodes that were measured before."""
    found = known.get(id(node))
    if found is not None:
        return found
    known[id(node)] = (0, MAX_DEPTH + 1)  # what a node finds that holds itself
    values, depth = 1, 0
    for child in _children(node):
        more, below = _measure(child, known)
        values, depth = values + more, max(depth, below + 1)
    if depth > MAX_DEPTH:
        raise _too_deep()
    if values > MAX_VALUES:
        raise TooMuch(f"more than {MAX_VALUES} values, with its aliases written out")
    known[id(node)] = (values, depth)
    return values, depth


def _children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (each for pair in node.value for each in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _too_deep() -> TooMuch:
    return TooMuch(f"lists or mappings within each other, more than {MAX_DEPTH} deep")
